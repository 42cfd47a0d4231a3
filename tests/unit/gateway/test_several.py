"""Several choices and several prompts in one answer, plain and streamed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from core import types as t
from core.errors import DigestMismatch
from tests.support.scripted import Fault, Script
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.conftest import OpenSite

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SAID = ("hello world", "oh \U0001f680", "well")
LOGPROBS = t.TokenLogprobs(logprob=-0.5, rank=1, top=((40, -0.5), (41, -1.5)))


def script(**more: Any) -> Script:
    steps = [[[one] for one in ids_of(text)] for text in SAID]
    return Script(steps=steps[0], others=steps[1:], **more)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "say it", **more}


def by_index(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """The choices of all chunks, by choice."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event != "[DONE]":
            for choice in event["choices"]:
                found[choice["index"]].append(choice)
    return dict(found)


def said(choices: list[dict[str, Any]]) -> str:
    return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("mode", list(t.Mode))
async def test_each_choice_of_a_stream_equals_the_plain_one(open_site: OpenSite, path: str, mode: t.Mode) -> None:
    body = {**(chat() if path == CHAT else text()), "n": 3, "logprobs": True if path == CHAT else 0}
    async with open_site(script(mode=mode, logprobs=lambda token_id: LOGPROBS)) as site:
        plain = (await site.client.post(path, body)).json()
        options = {"include_usage": True}
        events = (await site.client.post(path, {**body, "stream": True, "stream_options": options})).events()
        assert [request.sampling.n for request in site.cluster.requests] == [3, 3]
    streamed = by_index(events)
    assert [choice["index"] for choice in plain["choices"]] == sorted(streamed) == [0, 1, 2]
    for whole, chunks, wanted in zip(plain["choices"], (streamed[n] for n in range(3)), SAID, strict=True):
        assert said(chunks) == wanted == (whole["message"]["content"] if path == CHAT else whole["text"])
        assert [one["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
        key = "content" if path == CHAT else "token_logprobs"
        scores = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"][key]]
        assert scores == whole["logprobs"][key]
        assert len(scores) == len(ids_of(wanted))
    assert (events[-1], events[-2]["choices"], events[-2]["usage"]) == ("[DONE]", [], plain["usage"])
    assert plain["usage"]["completion_tokens"] == sum(len(ids_of(one)) for one in SAID)


async def test_bug_017_the_role_comes_once_for_each_choice(open_site: OpenSite) -> None:
    async with open_site(script()) as site:
        events = (await site.client.post(CHAT, chat(n=3, stream=True))).events()
    for choices in by_index(events).values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in one["delta"] for one in choices[1:])
        assert all(one["delta"]["content"] for one in choices[1:-1])
        assert choices[-1]["delta"] == {}


async def test_choices_interleave_as_they_come(open_site: OpenSite) -> None:
    async with open_site(script(mode=t.Mode.LOCAL)) as site:
        site.cluster.hold("token-2")
        call = site.client.start("POST", TEXT, text(n=3, stream=True))
        await site.cluster.until("token-2")
        await call.until(b'"index":2')
        early = by_index([event for event in call.reply.events()])
        site.cluster.release("token-2")
        late = by_index((await call.end()).events())
    assert {index: said(choices)[:1] for index, choices in early.items()} == {0: "h", 1: "o", 2: "w"}
    assert [said(late[index]) for index in range(3)] == list(SAID)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_counted_prompt_by_prompt(open_site: OpenSite, stream: bool) -> None:
    ids = ids_of("ab")
    async with open_site(script()) as site:
        for prompts in (["one", "two!"], [ids, [*ids, 5]], ["one", ids]):
            body = text(prompt=prompts, n=2, echo=True, stream=stream, best_of=2)
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            reply = await site.client.post(TEXT, body)
            if stream:
                found = {index: said(choices) for index, choices in by_index(reply.events()).items()}
                usage = reply.events()[-2]["usage"]
            else:
                found = {choice["index"]: choice["text"] for choice in reply.json()["choices"]}
                usage = reply.json()["usage"]
            sent = [request.prompt_token_ids for request in site.cluster.requests[-2:]]
            echoes = [
                "ab" if one == ids else "ab" + chr(33 + 5 - 2) if isinstance(one, list) else one for one in prompts
            ]
            assert [found[2 * number + sample].endswith(SAID[sample]) for number in (0, 1) for sample in (0, 1)] == [
                True
            ] * 4
            assert found[0].removesuffix(SAID[0]) == found[1].removesuffix(SAID[1]) == echoes[0]
            assert found[2].removesuffix(SAID[0]) == found[3].removesuffix(SAID[1])
            assert usage["prompt_tokens"] == sum(map(len, sent)), "once for each prompt"
            assert usage["completion_tokens"] == 2 * sum(len(ids_of(one)) for one in SAID[:2])
            names = [request.request_id for request in site.cluster.requests[-2:]]
            assert len(set(names)) == 2


async def test_token_ids_of_prompts_stand_in_their_choices(open_site: OpenSite) -> None:
    async with open_site(script()) as site:
        body = text(prompt=["ab", "c"], n=2, return_token_ids=True)
        plain = (await site.client.post(TEXT, body)).json()["choices"]
        events = (await site.client.post(TEXT, {**body, "stream": True})).events()
    prompts = [ids_of("ab"), ids_of("ab"), ids_of("c"), ids_of("c")]
    assert [choice["prompt_token_ids"] for choice in plain] == prompts
    for index, choices in by_index(events).items():
        assert choices[0]["prompt_token_ids"] == prompts[index]
        assert [one for choice in choices for one in choice["token_ids"]] == plain[index]["token_ids"]
        assert all("prompt_token_ids" not in choice for choice in choices[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_in_the_middle_leaves_no_seam_in_any_choice(open_site: OpenSite, stream: bool) -> None:
    faults = {1: Fault(fail_at=3, error=DigestMismatch("bad"))}
    async with open_site(script(faults=faults)) as site:
        reply = await site.client.post(TEXT, text(n=3, stream=stream, prompt=["a", "b"]))
        assert reply.status == 200
        if stream:
            found = {index: said(choices) for index, choices in by_index(reply.events()).items()}
        else:
            found = {choice["index"]: choice["text"] for choice in reply.json()["choices"]}
        assert max(place.attempt for place in site.cluster.places) > 1
    assert found == dict(enumerate(SAID * 2))


@pytest.mark.parametrize("state", ["place", "prefill", "admit", "token-2"])
async def test_a_client_that_leaves_ends_every_choice_of_every_prompt(open_site: OpenSite, state: str) -> None:
    async with open_site(script()) as site:
        site.cluster.hold(state)
        call = site.client.start("POST", TEXT, text(n=2, prompt=["a", "b"], stream=True))
        await site.cluster.until(state)
        call.leave()
        await call.end()
        await site.gateway.peers.drain(1.0)
        assert site.telemetry.registry.get_sample_value("baton_gateway_num_requests_running") == 0
        admitted = {request.request_id for request in site.cluster.requests}
        aborted = [leg for leg, _, reason in site.cluster.aborts if reason == "cancelled"]
        assert aborted.count("decode") >= len(admitted)
        assert (len(admitted) == 2) == (state in ("admit", "token-2", "prefill"))


async def test_the_error_of_one_prompt_is_the_answers_and_ends_the_others(open_site: OpenSite) -> None:
    async with open_site(script()) as site:
        site.cluster.hold("token-2")
        place, num_placed = site.cluster.place, 0

        async def refuse_second(request: t.PlaceRequest) -> t.Placement:
            nonlocal num_placed
            num_placed += 1
            if num_placed == 2:
                await site.cluster.until("token-2")
                raise RuntimeError("broken")
            return await place(request)

        site.cluster.place = refuse_second  # type: ignore[method-assign]
        reply = await site.client.post(TEXT, text(prompt=["a", "b"]))
        assert reply.status == 500
        await site.gateway.peers.drain(1.0)
        assert {leg for leg, _, _ in site.cluster.aborts} == {"decode", "prefill"}
        site.cluster.release("token-2")
        await asyncio.sleep(0)


async def test_greedy_choices_are_served_and_equal(open_site: OpenSite) -> None:
    async with open_site(Script(steps=[[one] for one in ids_of("ab")])) as site:
        choices = (await site.client.post(CHAT, chat(n=3, temperature=0))).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["ab"] * 3
