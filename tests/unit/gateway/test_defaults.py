"""Defaults of generation_config.json are resolved here, once: what a worker is sent has no gaps to fill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.config import LimitsConfig
from core.types import SamplingParams
from gateway.models import ServedModel
from gateway.parse import chat_job, completion_job
from gateway.schemas import ChatBody, CompletionBody, parse_body
from modelfiles import GenerationDefaults
from tests.unit.gateway.conftest import MAX_CONTEXT, served_model

REPOSITORY = Path(__file__).parents[3]
OF_THE_MODEL = GenerationDefaults(
    temperature=0.3, top_p=0.8, top_k=7, min_p=0.05, repetition_penalty=1.2, max_new_tokens=11
)
GIVEN: dict[str, Any] = {"temperature": 1.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.4}
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling(model: ServedModel, *, is_chat: bool, **more: Any) -> SamplingParams:
    limits = LimitsConfig()
    if is_chat:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
        return chat_job(parse_body(ChatBody, json.dumps(body).encode()), model, limits).sampling
    body = {"model": "m", "prompt": "hi", **more}
    return completion_job(parse_body(CompletionBody, json.dumps(body).encode()), model, limits).sampling


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("name", NEUTRAL)
def test_the_request_comes_first_then_the_model_then_openai(name: str, is_chat: bool) -> None:
    model = replace(served_model(), defaults=OF_THE_MODEL)
    assert getattr(sampling(model, is_chat=is_chat, **GIVEN), name) == GIVEN[name]
    assert getattr(sampling(model, is_chat=is_chat, **{name: None}), name) == getattr(OF_THE_MODEL, name)
    assert getattr(sampling(served_model(), is_chat=is_chat), name) == NEUTRAL[name]


def test_a_given_neutral_value_is_not_taken_for_absent() -> None:
    model = replace(served_model(), defaults=OF_THE_MODEL)
    got = sampling(model, is_chat=True, temperature=0, top_k=0, min_p=0, top_p=1, repetition_penalty=1)
    assert (got.temperature, got.top_k, got.min_p, got.top_p, got.repetition_penalty) == (0.0, 0, 0.0, 1.0, 1.0)


def test_the_length_of_an_answer() -> None:
    model = replace(served_model(), defaults=OF_THE_MODEL)
    assert sampling(model, is_chat=True).max_tokens == 11
    assert sampling(model, is_chat=True, max_tokens=20).max_tokens == 20
    assert sampling(model, is_chat=False).max_tokens == 16, "text completions have a default of their own"
    assert 11 < sampling(served_model(), is_chat=True).max_tokens < MAX_CONTEXT


def test_every_end_token_of_the_model_is_sent() -> None:
    model = replace(served_model(), eos_token_ids=(1, 5))
    assert sampling(model, is_chat=True).eos_token_ids == (1, 5)


def test_workers_know_no_defaults() -> None:
    """A second place that fills gaps would be a second truth."""
    for package in ("engine", "worker", "prefill_worker", "decode_worker", "router", "rpc"):
        for path in (REPOSITORY / package).rglob("*.py"):
            assert "generation_defaults" not in path.read_text(), path
