"""The laws of an answer's text, from the body that asks to the events that come: any tokens, grouping and options."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core import types as t
from core.config import LimitsConfig
from gateway.parse import tokenize
from gateway.schemas import TokenizeBody, parse_body
from tests.support.scripted import Script
from tests.support.site import open_site, served_model
from tests.support.tiny_tokenizer import EOS_TEXT, START_TEXT, ids_of, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = served_model()
CONTROL = [TOKENIZER.added_id(one) for one in (START_TEXT, EOS_TEXT)]
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

letters = st.sampled_from("ab<|> \n\u00e9\u6f22\U0001f999\u200d")
token_ids = st.lists(st.integers(0, TOKENIZER.num_tokens - 1), min_size=1, max_size=24)
said = token_ids | st.text(letters, min_size=1, max_size=14).map(ids_of)
options = st.fixed_dictionaries(
    {
        "stop": st.lists(st.text(st.sampled_from("ab<|\u00e9"), min_size=1, max_size=3), max_size=3, unique=True),
        "min_tokens": st.integers(0, 6),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
    }
)


def score(token_id: int) -> t.TokenLogprobs:
    return t.TokenLogprobs(logprob=-token_id / 100, rank=1, top=((token_id, -token_id / 100),))


async def ask(script: Script, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The plain answer and the events of the streamed one."""
    async with open_site(script) as site:
        plain = await site.client.post(path, body)
        assert plain.status == 200, plain.body
        stream = await site.client.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    return plain.json(), stream.events()


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


def tokens_of(choice: dict[str, Any], route: str) -> list[Any]:
    scores = choice["logprobs"] or {}
    return list(scores.get("content" if route == "chat" else "token_logprobs", []))


@settings(max_examples=60)
@given(
    route=st.sampled_from(sorted(PATHS)),
    answers=st.lists(said, min_size=1, max_size=3),
    size=st.integers(1, 7),
    body=options,
    scored=st.booleans(),
    mode=st.sampled_from(list(t.Mode)),
    ends_alone=st.booleans(),
)
def test_a_stream_and_its_plain_answer_tell_the_same(
    route: str, answers: list[list[int]], size: int, body: dict[str, Any], scored: bool, mode: t.Mode, ends_alone: bool
) -> None:
    steps = [[ids[at : at + size] for at in range(0, len(ids), size)] for ids in answers]
    script = Script(
        steps=steps[0], others=steps[1:], mode=mode, finish_alone=ends_alone, logprobs=score if scored else None
    )
    asked: dict[str, Any] = {"model": "m", "n": len(answers), "max_tokens": 64, **body}
    asked |= {"messages": [{"role": "user", "content": "x"}]} if route == "chat" else {"prompt": "x"}
    if scored:
        asked["logprobs"] = True if route == "chat" else 1
    plain, events = asyncio.run(ask(script, PATHS[route], asked))
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    assert events[-2]["choices"] == [] and events[-2]["usage"] == plain["usage"]
    num_tokens = 0
    for index, whole in enumerate(plain["choices"]):
        parts = [one for event in events[:-2] for one in event["choices"] if one["index"] == index]
        text = "".join(map(text_of, parts))
        assert text == text_of(whole)
        assert [one["finish_reason"] for one in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
        assert parts[-1]["stop_reason"] == whole["stop_reason"]
        assert sum("role" in one.get("delta", {}) for one in parts) == (1 if route == "chat" else 0)
        if "\ufffd" not in text:
            assert not any("\ufffd" in text_of(one) for one in parts)
        if route == "chat":
            assert all(text_of(one) for one in parts[1:-1]), "no empty chunk"
        if not body["min_tokens"] and not body["include_stop_str_in_output"]:
            assert not any(stop in text for stop in body["stop"])
        if body["return_token_ids"]:
            streamed = [one for part in parts for one in part.get("token_ids", [])]
            assert streamed == whole["token_ids"] == answers[index][: len(streamed)]
            num_tokens += len(streamed)
            if not body["stop"]:
                skip = body["skip_special_tokens"]
                assert text == TOKENIZER.decode(streamed, skip_special_tokens=skip)
        if scored:
            assert [one for part in parts for one in tokens_of(part, route)] == tokens_of(whole, route)
            assert not body["return_token_ids"] or len(tokens_of(whole, route)) == len(whole["token_ids"])
    assert not body["return_token_ids"] or plain["usage"]["completion_tokens"] == num_tokens


pieces = st.sampled_from([START_TEXT, EOS_TEXT, "<|im_", "end|>", "start|>", "|", "<", ">", "\n", "system", "a", " "])


@settings(max_examples=150)
@given(
    contents=st.lists(st.lists(pieces, max_size=8), min_size=1, max_size=3),
    roles=st.lists(st.sampled_from(["user", "assistant", "system", "developer"]), min_size=3, max_size=3),
    splits=st.booleans(),
)
def test_what_is_typed_never_becomes_a_control_token(contents: list[list[str]], roles: list[str], splits: bool) -> None:
    def messages(texts: list[Any]) -> list[dict[str, Any]]:
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    def typed(parts: list[str]) -> Any:
        return [{"type": "text", "text": part} for part in parts] if splits else "".join(parts)

    def counts(texts: list[Any]) -> list[int]:
        body = parse_body(TokenizeBody, json.dumps({"messages": messages(texts)}).encode())
        ids = tokenize(body, MODEL, LimitsConfig())
        return [ids.count(one or 0) for one in CONTROL]

    assert counts([typed(parts) for parts in contents]) == counts(["a"] * len(contents))
