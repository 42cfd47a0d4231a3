"""Five thousand spoilt bodies: each gets an answer or a refusal of the one shape, and the next request works."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from core import types as t
from gateway.models import ServedModel
from tests.support.asgi import Client
from tests.support.caller import Caller
from tests.support.mutations import BODIES, Mutant, Mutator
from tests.support.scripted import Script
from tests.support.site import cluster_config, open_site, serve, served_model
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer
from tests.support.tool_templates import HERMES

NUM_DIRECT, NUM_BY_SOCKET = 5000, 400
NUM_CALLERS = 16
LIMITS = {"max_body_bytes": 262_144, "max_requests": 64}
EOS = tiny_tokenizer().added_id(EOS_TEXT) or 0
NORMAL = {"model": "m", "prompt": "say it"}


def script() -> Script:
    return Script(
        steps=[ids_of("hell"), ids_of("o wor"), [*ids_of("ld"), EOS]],
        finish_reason=t.FinishReason.STOP,
        stop_token_id=EOS,
        logprobs=lambda token_id: t.TokenLogprobs(logprob=-0.5, rank=1, top=((token_id, -0.5),)),
    )


def model() -> ServedModel:
    """It knows tools, and its answer is no call of one."""
    return served_model(template=HERMES, max_context=2000)


def check(mutant: Mutant, status: int, headers: dict[str, str], body: bytes) -> str:
    """What holds for every answer; a word for what came."""
    where = (mutant.method, mutant.path, mutant.kinds, mutant.raw[:600], status, body[:600])
    assert 200 <= status < 300 or 400 <= status < 500, where
    assert len(headers["x-request-id"]) == 32, where
    if mutant.method == "HEAD":
        return "head"
    if headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in body.decode().split("\n") if line.startswith("data: ")]
        for line in lines:
            if line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "), parse_constant=no_number)
                assert not event.get("error"), where
        ends = ("data: [DONE]", "response.completed", "response.incomplete")
        assert any(word in lines[-1] for word in ends), where
        return "stream"
    value = json.loads(body, parse_constant=no_number)
    if status < 300:
        return "answer"
    error = value["error"]
    assert set(error) == {"message", "type", "param", "code"}, where
    assert error["message"] and len(error["message"]) < 2048, where
    assert isinstance(error["type"], str) and isinstance(error["code"], str), where
    assert error["param"] is None or isinstance(error["param"], str), where
    assert not any(word in error["message"] for word in ("Traceback", "Error(", "/gateway/", "pydantic")), where
    return f"refusal {status}"


def no_number(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.timeout(300)
async def test_5000_spoilt_bodies_give_answers_or_refusals() -> None:
    mutator, counts = Mutator(20261130), Counter[str]()
    mutants = iter([mutator.draw() for _ in range(NUM_DIRECT)])
    async with open_site(script(), model=model(), limits=LIMITS) as site:

        async def call(client: Client) -> None:
            for number, mutant in enumerate(mutants):
                pieces = 1 + number % 3
                one = client.start(mutant.method, mutant.path, mutant.raw, headers=mutant.headers, pieces=pieces)
                reply = await one.end()
                counts[check(mutant, reply.status, reply.headers, reply.body)] += 1
                if number % 50 == 0:
                    assert (await client.post("/v1/completions", NORMAL)).status == 200

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(call(site.client))
        assert (await site.client.post("/v1/completions", NORMAL)).json()["choices"][0]["text"] == "hello world"
        assert site.telemetry.registry.get_sample_value("baton_gateway_num_requests_running") == 0
    assert counts.total() == NUM_DIRECT
    assert counts["answer"] + counts["stream"] > NUM_DIRECT / 10, "not all are refused at the door"
    assert counts["refusal 400"] > NUM_DIRECT / 3
    assert {"refusal 405", "refusal 413", "refusal 415"} <= set(counts), counts


@pytest.mark.timeout(300)
async def test_spoilt_bodies_by_socket_leave_the_connection_usable() -> None:
    mutator = Mutator(7)
    settings: dict[str, Any] = {"limits": LIMITS}
    async with (
        open_site(script(), model=model(), **settings) as site,
        serve(site.gateway, cluster_config(**settings).gateway) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
    ):
        for _ in range(NUM_BY_SOCKET):
            mutant = mutator.draw()
            headers = {"content-type": "application/json", **mutant.headers}
            answer = await http.request(mutant.method, mutant.path, content=mutant.raw, headers=headers)
            check(mutant, answer.status_code, dict(answer.headers), answer.content)
        assert (await Caller(http).good("/v1/completions", NORMAL))["choices"][0]["text"] == "hello world"


async def test_the_bodies_are_valid_before_they_are_spoilt() -> None:
    async with open_site(script(), model=model(), limits=LIMITS) as site:
        for path, body in BODIES:
            reply = await site.client.post(path, body)
            assert reply.status == 200, (path, body, reply.body)


def test_the_same_seed_draws_the_same_bodies() -> None:
    first, second = Mutator(3), Mutator(3)
    assert all(first.draw() == second.draw() for _ in itertools.repeat(None, 50))
