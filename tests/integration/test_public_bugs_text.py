"""Reports of users of other servers, as cases: stops, characters, log probabilities, usage and the form of chunks.

Through a real socket. A scripted engine plays the tokens where a case needs them grouped or cut in a certain way, with
the real model's tokenizer; where it is about what is computed, it is the real model.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core import types as t
from core.config import load_config
from engine.engine import Engine
from gateway.models import ServedModel
from tests.support.caller import Caller
from tests.support.local_cluster import MODEL
from tests.support.scripted import Script
from tests.support.served_cluster import ServedCluster, served_cluster
from tests.support.site import cluster_config, open_site, serve

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ALPHABET = "The alphabet is A B C D"
LIMITS = {"max_body_bytes": 1 << 20, "max_requests": 64}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(loaded_engines: dict[str, Engine]) -> AsyncIterator[ServedCluster]:
    async with served_cluster(loaded_engines) as it:
        yield it


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(load_config(environ={}).models[0])


@asynccontextmanager
async def scripted(model: ServedModel, script: Script) -> AsyncIterator[Caller]:
    async with (
        open_site(script, model=model, limits=LIMITS) as site,
        serve(site.gateway, cluster_config(limits=LIMITS).gateway) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
    ):
        yield Caller(http)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "temperature": 0, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": ALPHABET, "temperature": 0, **more}


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"]]


def said(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def both(caller: Caller, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plain answer's choice and the stream's. Checks that they say the same."""
    [plain] = (await caller.good(path, body))["choices"]
    streamed = choices_of(await caller.events(path, body))
    assert said(streamed) == (plain["message"]["content"] if path == CHAT else plain["text"])
    reasons = [choice["finish_reason"] for choice in streamed]
    assert reasons == [None] * (len(reasons) - 1) + [plain["finish_reason"]]
    return plain, streamed


# -- stops ------------------------------------------------------------------------------------------------------------


async def test_bug_001_no_piece_of_a_stop_of_several_tokens_is_sent(real: ServedCluster) -> None:
    whole = (await real.good(TEXT, text(max_tokens=14, logprobs=0)))["choices"][0]
    offsets = [at for at in whole["logprobs"]["text_offset"] if 0 < at < len(whole["text"])]
    middle = len(offsets) // 2
    stop = whole["text"][offsets[middle] + 1 : offsets[middle + 2] + 1]
    assert len(stop) > 1
    before = whole["text"][: whole["text"].index(stop)]
    plain, streamed = await both(real, TEXT, text(max_tokens=14, stop=[stop]))
    assert plain["text"] == before
    assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", stop)
    assert streamed[-1]["stop_reason"] == stop
    # A prefix of a stop at the end of a run is text like any other.
    held = whole["text"][-2:] + "\0"
    plain, _ = await both(real, TEXT, text(max_tokens=14, stop=[held]))
    assert (plain["text"], plain["finish_reason"]) == (whole["text"], "length")


async def test_bug_002_what_is_held_back_is_not_sent_as_nothing(real: ServedCluster) -> None:
    body = chat(max_tokens=16, stop=["a very long stop string that does not occur"])
    _, streamed = await both(real, CHAT, body)
    assert streamed[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"]["content"] for choice in streamed[1:-1])
    assert streamed[-1]["delta"] == {}


async def test_bug_004_a_stop_string_waits_for_the_least_number_of_tokens(real: ServedCluster) -> None:
    whole = (await real.good(TEXT, text(max_tokens=14, logprobs=0)))["choices"][0]
    early = whole["logprobs"]["tokens"][2]
    found = await real.good(TEXT, text(max_tokens=14, min_tokens=8, stop=[early]))
    assert found["usage"]["completion_tokens"] >= 8
    choice = found["choices"][0]
    assert whole["text"].startswith(choice["text"]) and early in choice["text"]
    await both(real, TEXT, text(max_tokens=14, min_tokens=8, stop=[early]))


@pytest.mark.parametrize("shows", [False, True])
async def test_bug_005_the_text_of_a_special_token_stops_as_its_id(model: ServedModel, shows: bool) -> None:
    mark = model.tokenizer.added_id("<|im_end|>")
    assert mark is not None
    ids = [*model.tokenizer.encode("Hi there", parse_special=False), mark]
    script = Script(steps=[[one] for one in ids], finish_reason=t.FinishReason.STOP, stop_token_id=mark)
    body = chat(ignore_eos=True, max_tokens=60, stop=["<|im_end|>"], skip_special_tokens=not shows)
    async with scripted(model, script) as caller:
        plain, _ = await both(caller, CHAT, body)
        kept, _ = await both(caller, CHAT, {**body, "include_stop_str_in_output": True})
    assert (plain["message"]["content"], plain["finish_reason"]) == ("Hi there", "stop")
    assert kept["message"]["content"] == ("Hi there<|im_end|>" if shows else "Hi there")


async def test_bug_005_the_real_model_stops_there_too(real: ServedCluster) -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    for mark in ("<|im_end|>", "<|im_start|>"):
        body = chat(messages=messages, ignore_eos=True, max_tokens=40, stop=[mark], return_token_ids=True)
        choice = (await real.good(CHAT, body))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert len(choice["token_ids"]) < 40 and mark not in choice["message"]["content"]


@pytest.mark.parametrize(
    ("member", "good", "bad"),
    [
        ("stop", ["a1", "b2", "c3", "d4"], ["a1", "b2", "c3", "d4", "e5"]),
        ("stop", "a1", ["a1", ""]),
        ("stop_token_ids", list(range(5, 69)), list(range(5, 70))),
        ("stop_token_ids", [5], list(range(5, 5005))),
    ],
)
async def test_bug_007_the_limits_of_stops_are_one_and_told(
    model: ServedModel, member: str, good: Any, bad: Any
) -> None:
    async with scripted(model, Script(steps=[[57]])) as caller:
        for stream in (False, True):
            error = await caller.refused(CHAT, chat(stream=stream, max_tokens=4, **{member: bad}))
            assert error["param"].split(".")[0] == member
        await caller.good(CHAT, chat(max_tokens=4, **{member: good}))


# -- characters -------------------------------------------------------------------------------------------------------

ODD = "a\U0001f999b\u6f22\u5b57\U0001f469\u200d\U0001f469\u200d\U0001f467\u00e9"
ROCKETS = "ok \U0001f680\U0001f680 done"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bug_008_characters_of_several_tokens_come_whole(model: ServedModel, path: str) -> None:
    ids = model.tokenizer.encode(ODD, parse_special=False)
    assert len(ids) > len(ODD), "some characters are several tokens"
    async with scripted(model, Script(steps=[[one] for one in ids])) as caller:
        _, streamed = await both(caller, path, chat(max_tokens=60) if path == CHAT else text(max_tokens=60))
    assert said(streamed) == ODD
    assert "\ufffd" not in json.dumps(streamed, ensure_ascii=False)


async def test_bug_008_the_real_model_is_forced_to_write_them(real: ServedCluster) -> None:
    body = chat(max_tokens=60, structured_outputs={"choice": [ODD]})
    plain, streamed = await both(real, CHAT, body)
    assert (said(streamed), plain["finish_reason"]) == (ODD, "stop")


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_bug_010_a_limit_inside_a_character_ends_with_one_mark(real: ServedCluster, num_tokens: int) -> None:
    emoji = "\U0001f999"
    body = chat(max_tokens=num_tokens, structured_outputs={"choice": [emoji]}, logprobs=True)
    answer = await real.good(CHAT, body)
    plain, streamed = await both(real, CHAT, body)
    scores = plain["logprobs"]["content"]
    assert answer["usage"]["completion_tokens"] == num_tokens == len(scores)
    told = b"".join(bytes(one["bytes"]) for one in scores)
    assert emoji.encode().startswith(told)
    assert said(streamed) == (emoji if told == emoji.encode() else "\ufffd")
    assert plain["finish_reason"] == "length" or told == emoji.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
async def test_bug_011_steps_may_end_inside_characters(model: ServedModel, size: int) -> None:
    ids = model.tokenizer.encode(ROCKETS, parse_special=False)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    async with scripted(model, Script(steps=steps)) as caller:
        _, streamed = await both(caller, TEXT, text(max_tokens=30))
    assert said(streamed) == ROCKETS
    assert all("\ufffd" not in choice["text"] for choice in streamed)


# -- usage and the form of chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
async def test_bug_013_an_empty_options_object_asks_for_nothing(model: ServedModel, options: Any) -> None:
    async with scripted(model, Script(steps=[[57], [58]])) as caller:
        events = await caller.events(CHAT, chat(max_tokens=3, stream_options=options))
        assert all("usage" not in event and event["choices"] for event in events)
        if options is not None:
            error = await caller.refused(CHAT, chat(max_tokens=3, stream_options=options))
            assert error["param"] == "stream_options"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bug_014_usage_comes_once_at_the_end(model: ServedModel, path: str) -> None:
    body = chat(max_tokens=8) if path == CHAT else text(max_tokens=8)
    async with scripted(model, Script(steps=[[57], [58], [59]])) as caller:
        plain = await caller.good(path, body)
        events = await caller.events(path, {**body, "stream_options": {"include_usage": True}})
        running = await caller.events(
            path, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        )
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], plain["usage"])
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert counts == sorted(counts) and counts[-1] == 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bug_016_a_reason_is_null_until_there_is_one(model: ServedModel, path: str) -> None:
    body = chat(max_tokens=4) if path == CHAT else text(max_tokens=4)
    async with scripted(model, Script(steps=[[57], [58]])) as caller:
        plain, streamed = await both(caller, path, body)
    assert all("finish_reason" in choice and "logprobs" in choice for choice in streamed)
    assert plain["logprobs"] is None
    if path == CHAT:
        assert plain["message"]["refusal"] is None


async def test_bug_017_the_role_is_told_once_for_each_choice(real: ServedCluster) -> None:
    streamed = choices_of(await real.events(CHAT, chat(max_tokens=6, n=2, temperature=1, seed=1)))
    for index in (0, 1):
        deltas = [choice["delta"] for choice in streamed if choice["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("mode", list(t.Mode))
async def test_bug_019_a_reason_may_come_without_tokens(model: ServedModel, mode: t.Mode) -> None:
    script = Script(steps=[[57], [58]], finish_reason=t.FinishReason.STOP, finish_alone=True, mode=mode)
    async with scripted(model, script) as caller:
        plain, streamed = await both(caller, CHAT, chat(max_tokens=20))
    assert plain["finish_reason"] == "stop"
    assert said(streamed)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_bug_022_an_answer_of_one_token_is_not_lost(real: ServedCluster, path: str, include_usage: bool) -> None:
    body = (chat if path == CHAT else text)(max_tokens=1)
    plain, streamed = await both(real, path, body)
    assert said(streamed) and plain["finish_reason"] == "length"
    if include_usage:
        events = await real.events(path, {**body, "stream_options": {"include_usage": True}})
        assert events[-1]["usage"]["completion_tokens"] == 1
        assert said(choices_of(events)) == said(streamed)


# -- echo and log probabilities ---------------------------------------------------------------------------------------

SKY = "The sky is blue."


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_bug_023_a_prompt_can_be_scored_without_an_answer(real: ServedCluster, logprobs: int | None) -> None:
    body = text(prompt=SKY, echo=True, max_tokens=0, logprobs=logprobs)
    answer = await real.good(TEXT, body)
    plain, streamed = await both(real, TEXT, body)
    assert (plain["text"], plain["finish_reason"]) == (SKY, "length")
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert plain["logprobs"] is None
        return
    scores = plain["logprobs"]
    assert "".join(scores["tokens"]) == SKY
    assert {len(scores[name]) for name in scores} == {answer["usage"]["prompt_tokens"]}
    assert scores["token_logprobs"][0] is None and all(value < 0 for value in scores["token_logprobs"][1:])
    told = [one for choice in streamed if choice["logprobs"] for one in choice["logprobs"]["tokens"]]
    assert told == scores["tokens"]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("prompt", [[504, 6330, 314], [[504, 6330, 314], [504]]], ids=["ids", "two"])
async def test_bug_029_token_ids_are_echoed_as_text(real: ServedCluster, prompt: Any, logprobs: int | None) -> None:
    body = text(prompt=prompt, echo=True, max_tokens=4, logprobs=logprobs)
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    plain = (await real.good(TEXT, body))["choices"]
    streamed = choices_of(await real.events(TEXT, body))
    for index, one in enumerate(prompts):
        decoded = (await real.good("/detokenize", {"model": MODEL, "tokens": one}))["prompt"]
        assert plain[index]["text"].startswith(decoded) and len(plain[index]["text"]) > len(decoded)
        assert said([choice for choice in streamed if choice["index"] == index]) == plain[index]["text"]
        if logprobs:
            scores = plain[index]["logprobs"]
            assert len(scores["tokens"]) == len(one) + 4
            assert "".join(scores["tokens"]) == plain[index]["text"]


async def test_bug_031_minus_infinity_is_a_number_in_json(real: ServedCluster) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, text(prompt="Hello", echo=True, logprobs=5, top_k=1, max_tokens=3)),
        (TEXT, text(prompt="Hello", logprobs=5, max_tokens=3, allowed_token_ids=[57, 58])),
        (CHAT, chat(logprobs=True, top_logprobs=5, structured_outputs={"choice": ["yes"]}, max_tokens=3)),
        (CHAT, chat(logprobs=True, top_logprobs=5, logit_bias={str(one): -100 for one in range(100)}, max_tokens=3)),
    ]
    for path, body in bodies:
        answer = await real.good(path, body)  # reads strictly
        scores = answer["choices"][0]["logprobs"]
        values = (
            [one["logprob"] for token in scores["content"] for one in (token, *token["top_logprobs"])]
            if path == CHAT
            else [value for top in scores["top_logprobs"] if top for value in top.values()]
        )
        assert values and all(-9999.0 <= value <= 0 for value in values)
        await real.events(path, body)


async def test_bug_031_the_lowest_value_stands_for_it(model: ServedModel) -> None:
    scores = t.TokenLogprobs(logprob=float("-inf"), rank=9, top=((57, -0.1), (58, float("-inf"))))
    async with scripted(model, Script(steps=[[57], [58]], logprobs=lambda _: scores)) as caller:
        [choice] = (await caller.good(CHAT, chat(logprobs=True, top_logprobs=2)))["choices"]
        await caller.events(CHAT, chat(logprobs=True, top_logprobs=2))
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-9999.0, -9999.0]


async def test_bug_032_tokens_are_text_and_bytes_are_the_truth(model: ServedModel) -> None:
    content = "a b\nc \U0001f999"
    ids = model.tokenizer.encode(content, parse_special=False)
    scores = [t.TokenLogprobs(logprob=-0.5, rank=1, top=((one, -0.5), (57, -1.0))) for one in ids]
    by_id = dict(zip(ids, scores, strict=True))
    async with scripted(model, Script(steps=[ids], logprobs=lambda one: by_id[one])) as caller:
        plain, _ = await both(caller, CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=20))
    told = plain["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in told) == content.encode()
    for one in told:
        assert one["token"] and not set(one["token"]) & {"\u0120", "\u010a"}, "no glyphs of the tokenizer's own"
        assert one["token"] == bytes(one["bytes"]).decode("utf-8", "replace")
        assert one["top_logprobs"][0] == {key: one[key] for key in ("token", "logprob", "bytes")}


async def test_bug_034_no_alternatives_are_still_log_probabilities(real: ServedCluster) -> None:
    [plain] = (await real.good(TEXT, text(logprobs=0, max_tokens=3)))["choices"]
    assert len(plain["logprobs"]["token_logprobs"]) == 3
    assert [len(top) for top in plain["logprobs"]["top_logprobs"]] == [1, 1, 1]
    [chosen] = (await real.good(CHAT, chat(logprobs=True, top_logprobs=0, max_tokens=3)))["choices"]
    assert [one["top_logprobs"] for one in chosen["logprobs"]["content"]] == [[], [], []]
    streamed = choices_of(await real.events(TEXT, text(logprobs=0, max_tokens=3)))
    assert sum(len(choice["logprobs"]["tokens"]) for choice in streamed if choice["logprobs"]) == 3
