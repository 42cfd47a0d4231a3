"""The HTTP edge over a scripted cluster: answers, streams, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from core import types as t
from core.errors import DigestMismatch, OutOfBlocks, WorkerLost
from tests.support.scripted import Fault, Script
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer
from tests.unit.gateway.conftest import MAX_CONTEXT, OpenSite

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ANSWER = "hello world"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HI, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "say it", **more}


def content(events: list[Any]) -> str:
    chunks = [event for event in events if event != "[DONE]" and event.get("choices")]
    parts = [chunk["choices"][0] for chunk in chunks]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


LOGPROBS = t.TokenLogprobs(logprob=-0.5, rank=1, top=((40, -0.5), (41, float("-inf"))))


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("size", [1, 3, 11])
@pytest.mark.parametrize("stop", [None, "o w", "never there"])
async def test_the_joined_stream_equals_the_plain_answer(
    open_site: OpenSite, path: str, size: int, stop: str | None
) -> None:
    ids = ids_of(ANSWER)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    body = {**(chat() if path == CHAT else text()), "stop": stop}
    async with open_site(Script(steps=steps)) as site:
        plain = (await site.client.post(path, body)).json()
        options = {"include_usage": True}
        events = (await site.client.post(path, {**body, "stream": True, "stream_options": options})).events()
    choice = plain["choices"][0]
    assert content(events) == (choice["message"]["content"] if path == CHAT else choice["text"])
    assert content(events) == ("hell" if stop == "o w" else ANSWER)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == plain["usage"]
    chunks = events[:-2]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [reason for reason in reasons if reason] == [choice["finish_reason"]]
    assert reasons[-1] == choice["finish_reason"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


async def test_a_chat_stream_has_one_role_chunk_and_no_empty_deltas(open_site: OpenSite) -> None:
    async with open_site() as site:
        events = await site.client.post(CHAT, chat(stream=True, stop="a very long stop"))
        choices = [event["choices"][0] for event in events.events()[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert all(choice["delta"]["content"] for choice in choices[1:-1])
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
async def test_no_usage_chunk_unless_it_was_asked_for(open_site: OpenSite, options: object) -> None:
    async with open_site() as site:
        events = (await site.client.post(CHAT, chat(stream=True, stream_options=options))).events()
    assert all("usage" not in event for event in events[:-1])


async def test_a_one_token_answer_is_not_lost_in_a_stream(open_site: OpenSite) -> None:
    async with open_site(Script(steps=[ids_of("4")])) as site:
        for path, body in ((CHAT, chat(stream=True, max_tokens=1)), (TEXT, text(stream=True, max_tokens=1))):
            events = (await site.client.post(path, body)).events()
            assert content(events) == "4"
            assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_finish_without_tokens_has_its_reason(open_site: OpenSite) -> None:
    script = Script(steps=[ids_of("abc")], finish_alone=True, finish_reason=t.FinishReason.STOP)
    async with open_site(script) as site:
        events = (await site.client.post(CHAT, chat(stream=True))).events()
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]


@pytest.mark.parametrize("size", range(1, 6))
async def test_no_event_holds_half_a_character(open_site: OpenSite, size: int) -> None:
    wanted = "ok \U0001f680\U0001f680 \u6f22\u00e9 done"
    ids = ids_of(wanted)
    async with open_site(Script(steps=[ids[at : at + size] for at in range(0, len(ids), size)])) as site:
        reply = await site.client.post(CHAT, chat(stream=True))
    assert all(chunk.decode() is not None for chunk in reply.chunks)
    assert content(reply.events()) == wanted
    assert "\ufffd" not in reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_log_probabilities_join_to_the_generated_tokens(open_site: OpenSite, stream: bool) -> None:
    script = Script(steps=[[one] for one in ids_of("a\U0001f680b.c")], logprobs=lambda token_id: LOGPROBS)
    body = chat(logprobs=True, top_logprobs=2, stop=".", stream=stream)
    async with open_site(script) as site:
        reply = await site.client.post(CHAT, body)
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in reply.events()[:-1]]
        tokens = [token for part in parts if part for token in part["content"]]
    else:
        tokens = reply.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]) == "a\U0001f680b.".encode()
    assert tokens[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert b"Infinity" not in reply.body


async def test_completion_log_probabilities_of_zero_are_not_off(open_site: OpenSite) -> None:
    script = Script(steps=[[one] for one in ids_of("ab")], logprobs=lambda token_id: LOGPROBS)
    async with open_site(script) as site:
        logprobs = (await site.client.post(TEXT, text(logprobs=0))).json()["choices"][0]["logprobs"]
        chats = (await site.client.post(CHAT, chat(logprobs=True, top_logprobs=0))).json()["choices"][0]["logprobs"]
        assert [request.sampling.logprobs for request in site.cluster.requests] == [0, 0]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]
    assert logprobs["text_offset"] == [0, 1]
    assert [token["top_logprobs"] for token in chats["content"]] == [[], []]


async def test_token_ids_come_when_asked_for_and_decode_to_the_text(open_site: OpenSite) -> None:
    async with open_site() as site:
        plain = (await site.client.post(CHAT, chat(return_token_ids=True))).json()
        events = (await site.client.post(CHAT, chat(return_token_ids=True, stream=True))).events()
        prompt = (await site.client.post("/tokenize", {"model": "m", "messages": HI})).json()
    streamed = [one for event in events[:-1] for one in event["choices"][0].get("token_ids", [])]
    assert streamed == plain["choices"][0]["token_ids"] == ids_of(ANSWER)
    assert events[0]["prompt_token_ids"] == plain["prompt_token_ids"] == prompt["tokens"]


async def test_a_stop_that_is_a_special_tokens_text_is_also_a_stop_id(open_site: OpenSite) -> None:
    async with open_site() as site:
        await site.client.post(CHAT, chat(stop=[EOS_TEXT], ignore_eos=True, stop_token_ids=[9]))
        assert site.cluster.requests[0].sampling.stop_token_ids == (9, tiny_tokenizer().added_id(EOS_TEXT))


async def test_echo_returns_the_prompt_also_of_ids_and_alone(open_site: OpenSite) -> None:
    async with open_site() as site:
        ids = ids_of("say")
        for stream in (False, True):
            for prompt, start in (("say", "say"), (ids, "say"), (["say"], "say"), ([ids], "say")):
                reply = await site.client.post(TEXT, text(prompt=prompt, echo=True, stream=stream))
                got = content(reply.events()) if stream else reply.json()["choices"][0]["text"]
                assert got == start + ANSWER
            alone = await site.client.post(TEXT, text(prompt="say", echo=True, max_tokens=0, stream=stream))
            assert (content(alone.events()) if stream else alone.json()["choices"][0]["text"]) == "say"
        plain = (await site.client.post(TEXT, text(prompt="say", echo=True, max_tokens=0))).json()
    assert plain["usage"]["completion_tokens"] == 0
    assert plain["choices"][0]["finish_reason"] == "length"


async def test_timing_comes_only_when_asked_for_and_sums_up(open_site: OpenSite) -> None:
    asked = {"x-baton-timing": "1"}
    async with open_site() as site:
        assert "timing" not in (await site.client.post(CHAT, chat())).json()
        answer = await site.client.post(CHAT, chat(), headers=asked)
        plain, told = answer.json()["timing"], answer.headers["x-baton-timing"]
        events = (await site.client.post(CHAT, chat(stream=True), headers=asked)).events()
    assert told == ", ".join(f"{stage};dur={ms}" for stage, ms in plain["stages_ms"].items())
    for timing in (plain, events[-2]["timing"]):
        assert sum(timing["stages_ms"].values()) == pytest.approx(timing["total_ms"], abs=0.01)
        assert (timing["mode"], timing["attempts"], timing["decode_worker"]) == ("split", 1, "decode-0")


async def test_a_seed_is_drawn_when_none_is_given_and_kept_when_one_is(open_site: OpenSite) -> None:
    async with open_site() as site:
        for seed in (None, None, -1, 7, 7, 0):
            await site.client.post(CHAT, chat(seed=seed))
        seeds = [request.sampling.seed for request in site.cluster.requests]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == [7, 7, 0]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_a_true_status(open_site: OpenSite, stream: bool) -> None:
    faults = {n: Fault(on_admit=WorkerLost("gone", worker_id="decode-0")) for n in range(1, 9)}
    async with open_site(Script(steps=[[5]], faults=faults, num_decodes=1)) as site:
        reply = await site.client.post(CHAT, chat(stream=stream))
    assert reply.status == 503
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["retry-after"]) >= 1
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_error_after_the_first_token_is_an_event_and_ends_the_stream(open_site: OpenSite) -> None:
    faults = {n: Fault(fail_at=3, error=DigestMismatch("bad")) for n in range(1, 9)}
    async with open_site(Script(steps=[[one] for one in ids_of(ANSWER)], faults=faults)) as site:
        reply = await site.client.post(CHAT, chat(stream=True))
        events = reply.events()
    assert reply.status == 200
    assert reply.is_complete
    assert (events[-2]["error"]["code"], events[-1]) == ("digest_mismatch", "[DONE]")
    assert content(events[:-2]) == "hello"  # each attempt brought a token of its own


async def test_an_unforeseen_exception_is_a_500_that_tells_nothing(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:

        async def broken(request: t.PlaceRequest) -> t.Placement:
            raise RuntimeError("secret path /etc/x")

        monkeypatch.setattr(site.cluster, "place", broken)
        reply = await site.client.post(CHAT, chat())
        assert reply.status == 500
        assert b"secret" not in reply.body
        assert reply.headers["x-request-id"] in reply.json()["error"]["message"]
        monkeypatch.undo()
        assert (await site.client.post(CHAT, chat())).status == 200
    assert any(record.message == "handler failed" for record in caplog.records)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/models/a\nb", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/m", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods_have_the_error_shape(
    open_site: OpenSite, method: str, path: str, status: int, code: str
) -> None:
    async with open_site() as site:
        reply = await site.client.start(method, path).end()
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]
    assert ("allow" in reply.headers) == (status == 405)


async def test_a_body_over_the_limit_is_refused_while_it_is_read(open_site: OpenSite) -> None:
    async with open_site() as site:
        reply = await site.client.post(CHAT, chat(user="x" * 5000), pieces=7)
        assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert reply.headers["connection"] == "close"
        assert (await site.client.post(CHAT, chat(user="x" * 500), pieces=7)).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_types_are_refused(open_site: OpenSite, kind: str) -> None:
    async with open_site() as site:
        reply = await site.client.post(CHAT, chat(), headers={"content-type": kind})
    assert reply.status == 415


async def test_a_callers_request_id_is_a_label_only(open_site: OpenSite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    async with open_site() as site:
        labels = ["same", "same", "x" * 10000, "a\nb: c"]
        replies = await asyncio.gather(
            *(site.client.post(CHAT, chat(request_id="same"), headers={"x-request-id": one}) for one in labels)
        )
    ours = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ours)) == 4
    assert [reply.status for reply in replies] == [200] * 4
    logged = {record.request_id: record.client_request_id for record in caplog.records if record.message == "request"}
    assert [logged[one] for one in ours] == ["same", "same", None, None]


# -- leaving and stopping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["place", "prefill", "admit", "token-4"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(
    open_site: OpenSite, state: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    async with open_site() as site:
        site.cluster.hold(state)
        call = site.client.start("POST", CHAT, chat(stream=stream))
        await site.cluster.until(state)
        call.leave()
        await call.end()
        if state != "place":
            await site.gateway.peers.drain(1.0)
            assert {leg for leg, _, _ in site.cluster.aborts} == {"decode", "prefill"}
        assert site.telemetry.registry.get_sample_value("baton_gateway_num_requests_running") == 0
    [record] = [record for record in caplog.records if record.message == "request"]
    assert record.status == 499
    assert record.outcome == "cancelled"


async def test_requests_beyond_the_limit_are_refused_and_the_place_is_given_back(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.cluster.hold("admit")
        calls = [site.client.start("POST", CHAT, chat()) for _ in range(4)]
        await site.cluster.until("admit")
        refused = await site.client.post(CHAT, chat())
        assert (refused.status, refused.json()["error"]["code"]) == (503, "server_overloaded")
        site.cluster.release("admit")
        assert [(await call.end()).status for call in calls] == [200] * 4
        assert (await site.client.post(CHAT, chat())).status == 200


async def test_a_capacity_refusal_reaches_the_client_only_when_it_lasts(open_site: OpenSite) -> None:
    async with open_site(Script(steps=[ids_of("x")], faults={1: Fault(on_prefill=OutOfBlocks("full"))})) as site:
        assert (await site.client.post(CHAT, chat())).status == 200


async def test_draining_refuses_new_work_and_ends_the_rest_by_an_error(open_site: OpenSite) -> None:
    async with open_site() as site:
        await site.gateway.reporter.report()
        assert (await site.client.get("/ready")).status == 200
        site.cluster.hold("token-4")
        streamed = site.client.start("POST", CHAT, chat(stream=True))
        plain = site.client.start("POST", CHAT, chat())
        await streamed.until(b'"hell'[1:2])
        await site.cluster.until("token-4")
        drain = asyncio.ensure_future(site.gateway.drain())
        await asyncio.sleep(0)
        ready = await site.client.get("/ready")
        assert (ready.status, ready.json()["error"]["code"]) == (503, "draining")
        assert (await site.client.get("/health")).status == 200
        assert (await site.client.post(CHAT, chat())).json()["error"]["code"] == "draining"
        await drain
        assert (await plain.end()).status == 503
        events = (await streamed.end()).events()
        assert (events[-2]["error"]["code"], events[-1]) == ("draining", "[DONE]")


async def test_draining_waits_for_running_requests(open_site: OpenSite) -> None:
    async with open_site() as site:
        call = site.client.start("POST", CHAT, chat(stream=True))
        await call.until(b"[DONE]")
        await site.gateway.drain()
        assert content((await call.end()).events()) == ANSWER


async def test_ready_says_why_not(open_site: OpenSite) -> None:
    async with open_site() as site:
        assert "router has not answered" in (await site.client.get("/ready")).json()["error"]["message"]
        site.cluster.usable = (("m", False, "no ready decode worker"),)
        await site.gateway.reporter.report()
        reply = await site.client.get("/ready")
        assert (reply.status, reply.json()["error"]["code"]) == (503, "no_backend")
        assert "no ready decode worker" in reply.json()["error"]["message"]


async def test_finished_requests_are_reported_to_the_router_once(open_site: OpenSite) -> None:
    async with open_site() as site:
        reply = await site.client.post(CHAT, chat())
        await site.gateway.reporter.report()
        await site.gateway.reporter.report()
        records = [record for report in site.cluster.reports for record in report.records]
    [record] = records
    assert (record.request_id, record.outcome) == (reply.headers["x-request-id"], "length")
    assert record.num_completion_tokens == len(ANSWER)
    assert sum(seconds for _, seconds in record.stages) == pytest.approx(record.duration_s, abs=1e-3)


# -- tokens -----------------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_are_inverse_and_check_ids(open_site: OpenSite) -> None:
    size = tiny_tokenizer().num_tokens
    async with open_site() as site:
        for one in ("hello world", "\U0001f999 \u6f22\n", ""):
            tokens = (await site.client.post("/tokenize", {"prompt": one})).json()
            assert tokens["count"] == len(tokens["tokens"])
            assert tokens["token_strs"] is None
            back = await site.client.post("/detokenize", {"model": "m", "tokens": tokens["tokens"]})
            assert back.json() == {"prompt": one}
        for bad in ([-1], [2**63], [size], ["5"], [1.5], [True], "5", None, {}):
            reply = await site.client.post("/detokenize", {"model": "m", "tokens": bad})
            assert reply.status == 400, bad
            assert reply.json()["error"]["param"].startswith("tokens"), bad
        strings = (await site.client.post("/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
        assert strings["token_strs"] == ["hello"]
        for body in ({}, {"prompt": "a", "messages": HI}, {"messages": []}, {"messages": None}):
            assert (await site.client.post("/tokenize", body)).status == 400


async def test_the_longest_prompt_that_fits_is_served_and_one_more_is_refused(open_site: OpenSite) -> None:
    async with open_site() as site:
        for num_prompt, max_tokens, status in (
            (MAX_CONTEXT - 5, 5, 200),
            (MAX_CONTEXT - 4, 5, 400),
            (MAX_CONTEXT - 1, 1, 200),
            (MAX_CONTEXT, 1, 400),
            (MAX_CONTEXT + 50, 1, 400),
        ):
            reply = await site.client.post(TEXT, text(prompt=[5] * num_prompt, max_tokens=max_tokens))
            assert reply.status == status, (num_prompt, max_tokens)
        echo = await site.client.post(TEXT, text(prompt=[5] * MAX_CONTEXT, max_tokens=0, echo=True))
        assert echo.status == 200
        long = await site.client.post(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]})
        error = long.json()["error"]
        assert (long.status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert "xxx" not in error["message"]
        assert str(MAX_CONTEXT) in error["message"]


async def test_max_tokens_of_a_chat_is_the_rest_of_the_context(open_site: OpenSite) -> None:
    async with open_site() as site:
        await site.client.post(CHAT, chat())
        request = site.cluster.requests[0]
        assert request.num_prompt_tokens + request.sampling.max_tokens == MAX_CONTEXT
        await site.client.post(CHAT, chat(max_tokens=9, max_completion_tokens=4))
        assert site.cluster.requests[1].sampling.max_tokens == 4


async def test_the_access_log_is_one_line_with_facts(open_site: OpenSite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    async with open_site() as site:
        await site.client.post(CHAT, chat(stream=True))
    [record] = [record for record in caplog.records if record.name == "gateway.access"]
    facts = json.loads(json.dumps(vars(record), default=str))
    assert facts["status"] == 200
    assert (facts["outcome"], facts["num_completion_tokens"], facts["stream"]) == ("length", len(ANSWER), True)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", True),
        ("", False),
        ("x", False),
        ("00-" + "0" * 32 + "-1-01", False),
    ],
)
async def test_every_request_has_a_trace_context(open_site: OpenSite, given: str, is_kept: bool) -> None:
    async with open_site() as site:
        reply = await site.client.post(CHAT, chat(), headers={"traceparent": given})
        sent = site.cluster.requests[0].traceparent
    assert (sent == given) == is_kept
    assert is_kept or sent.split("-")[1] == reply.headers["x-request-id"]


async def test_a_body_that_never_ends_is_given_up(open_site: OpenSite) -> None:
    async with open_site(limits={"body_timeout_s": 0.01}) as site:
        call = site.client.start("POST", CHAT, chat(), pieces=2)
        call.stall()
        reply = await call.end()
    assert (reply.status, reply.json()["error"]["type"]) == (408, "timeout_error")


async def test_probes_leave_no_line_in_the_log(open_site: OpenSite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    async with open_site() as site:
        for path in ("/health", "/ready", "/metrics"):
            await site.client.get(path)
    assert caplog.records == []
