"""The responses route: events in their order, what is refused, and that it is a chat underneath."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core import types as t
from core.errors import WorkerLost
from tests.support import tool_templates as templates
from tests.support.asgi import Reply
from tests.support.scripted import Fault, Script
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer
from tests.unit.gateway.conftest import MAX_CONTEXT, OpenSite, served_model

PATH = "/v1/responses"
ANSWER = "hello \U0001f5fc"
USER = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", **more}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Checks what holds for every stream: names, numbers without holes, no closing line."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.body.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def script(reason: t.FinishReason = t.FinishReason.STOP, size: int = 1, **more: Any) -> Script:
    ids = ids_of(ANSWER)
    if reason is t.FinishReason.STOP:
        eos = tiny_tokenizer().added_id(EOS_TEXT)
        assert eos is not None
        ids.append(eos)
        more["stop_token_id"] = eos
    return Script(steps=[ids[at : at + size] for at in range(0, len(ids), size)], finish_reason=reason, **more)


ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.mark.parametrize("size", [1, 2, 5, 50])
@pytest.mark.parametrize("reason", [t.FinishReason.STOP, t.FinishReason.LENGTH])
async def test_a_stream_tells_everything_in_order_and_ends_as_the_plain_answer(
    open_site: OpenSite, reason: t.FinishReason, size: int
) -> None:
    async with open_site(script(reason, size)) as site:
        plain = (await site.client.post(PATH, ask())).json()
        events = events_of(await site.client.post(PATH, ask(stream=True)))
    is_cut = reason is t.FinishReason.LENGTH
    status = "incomplete" if is_cut else "completed"
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == [*ORDER, f"response.{status}"]
    assert all(kinds.count(kind) == 1 for kind in set(kinds) - {"response.output_text.delta"})
    by_kind = {event["type"]: event for event in events}
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert all(deltas)
    final = by_kind[f"response.{status}"]["response"]
    item = by_kind["response.output_item.done"]["item"]
    part = by_kind["response.content_part.done"]["part"]
    assert "".join(deltas) == by_kind["response.output_text.done"]["text"] == part["text"] == ANSWER
    assert item["content"] == [part]
    assert final["output"] == [item]
    assert item["status"] == final["status"] == status
    assert final["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    for event in (by_kind["response.created"], by_kind["response.in_progress"]):
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    added = by_kind["response.output_item.added"]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert len({event["item_id"] for event in events if "item_id" in event} | {item["id"], added["id"]}) == 1
    for whole in (plain, final):
        whole.pop("id"), whole.pop("created_at"), whole["output"][0].pop("id")
    assert final == plain
    num_tokens = len(ids_of(ANSWER)) + (not is_cut)
    assert plain["usage"]["output_tokens"] == num_tokens
    assert plain["usage"]["total_tokens"] == num_tokens + plain["usage"]["input_tokens"]


async def test_an_answer_without_text_is_an_empty_message(open_site: OpenSite) -> None:
    eos = tiny_tokenizer().added_id(EOS_TEXT)
    assert eos is not None
    one = Script(steps=[[eos]], finish_reason=t.FinishReason.STOP, stop_token_id=eos)
    async with open_site(one) as site:
        events = events_of(await site.client.post(PATH, ask(stream=True)))
    assert [event["type"] for event in events] == [kind for kind in ORDER if "delta" not in kind] + [
        "response.completed"
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_scores_come_with_their_text_and_all_of_them_at_the_end(open_site: OpenSite) -> None:
    scores = t.TokenLogprobs(logprob=-0.5, rank=1, top=((40, -0.5), (41, float("-inf"))))
    asked = ask(include=["message.output_text.logprobs"], top_logprobs=2)
    async with open_site(script(logprobs=lambda _: scores)) as site:
        plain = (await site.client.post(PATH, asked)).json()
        events = events_of(await site.client.post(PATH, {**asked, "stream": True}))
        silent = (await site.client.post(PATH, ask())).json()
    whole = plain["output"][0]["content"][0]["logprobs"]
    assert len(whole) == plain["usage"]["output_tokens"]
    assert [len(one["top_logprobs"]) for one in whole] == [2] * len(whole)
    told = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert told == whole[: len(told)]
    assert b"".join(bytes(one["bytes"]) for one in told).startswith(ANSWER.encode())
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == whole
    assert silent["output"][0]["content"][0]["logprobs"] == []


async def test_what_breaks_in_mid_stream_is_told_as_a_failed_response(open_site: OpenSite) -> None:
    faults = {attempt: Fault(fail_at=3, error=WorkerLost("scripted")) for attempt in range(1, 9)}
    async with open_site(script(faults=faults)) as site:
        events = events_of(await site.client.post(PATH, ask(stream=True)))
        plain = await site.client.post(PATH, ask())
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert [event["type"] for event in events[-4:-1]] == ORDER[-3:], "what was begun is closed"
    assert failed["output"][0]["status"] == "incomplete"
    assert failed["usage"]["output_tokens"] > 0
    assert plain.status == 503
    assert set(plain.json()["error"]) == {"message", "type", "param", "code"}


async def test_what_fails_before_the_first_token_is_no_stream(open_site: OpenSite) -> None:
    async with open_site(script(faults={1: Fault(on_place=WorkerLost("x"))})) as site:
        reply = await site.client.post(PATH, ask(stream=True, max_output_tokens=MAX_CONTEXT))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "max_output_tokens")


# -- what is asked ----------------------------------------------------------------------------------------------------


async def prompt_of(site: Any, path: str, body: dict[str, Any]) -> tuple[int, ...]:
    reply = await site.client.post(path, body)
    assert reply.status == 200, reply.body
    ids: tuple[int, ...] = site.cluster.requests[-1].prompt_token_ids
    return ids


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
        ({"input": [USER]}, [{"role": "user", "content": "hi"}]),
        ({"input": [{**USER, "type": "message"}]}, [{"role": "user", "content": "hi"}]),
        ({"input": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
        (
            {"input": "hi", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "No jokes."},
                    USER,
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "yes", "annotations": []}],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
                    },
                ]
            },
            [
                {"role": "developer", "content": "No jokes."},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "ab"},
            ],
        ),
    ],
)
async def test_the_prompt_is_that_of_the_chat_that_means_the_same(
    open_site: OpenSite, asked: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    async with open_site() as site:
        ours = await prompt_of(site, PATH, {"model": "m", **asked})
        chats = await prompt_of(site, "/v1/chat/completions", {"model": "m", "messages": messages})
    assert ours == chats


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]}, "input.1.content.0.type"),
        ({"input": [USER, {"role": "root", "content": "hi"}]}, "input.1.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_CONTEXT}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "s s", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_refused_by_the_callers_name(
    open_site: OpenSite, more: dict[str, Any], param: str
) -> None:
    async with open_site() as site:
        for stream in (False, True):
            reply = await site.client.post(PATH, ask(stream=stream, **more))
            error = reply.json()["error"]
            assert (reply.status, error["param"]) == (400, param), error
            assert "messages" not in error["message"] and "max_completion" not in error["message"]


async def test_a_response_says_what_was_asked_of_it(open_site: OpenSite) -> None:
    form = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    asked = ask(
        instructions="Be brief.",
        max_output_tokens=20,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        text={"format": form},
        store=True,
        user="u",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        stream_options=None,
        truncation="disabled",
        background=False,
        previous_response_id=None,
    )
    async with open_site(script(t.FinishReason.LENGTH)) as site:
        found = (await site.client.post(PATH, asked)).json()
        sampling = site.cluster.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (20, 0.5, 0.9)
    assert '"object"' in sampling.grammar or "object" in sampling.grammar
    told = {
        name: found[name] for name in ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
    }
    assert told == {name: asked[name] for name in told}
    assert found["text"]["format"] == form
    assert (found["store"], found["background"], found["object"]) == (False, False, "response")
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == ([], "auto", True)


async def test_extras_of_a_chat_are_honoured_here_too(open_site: OpenSite) -> None:
    asked = ask(top_k=7, seed=5, stop="lo", min_tokens=2, repetition_penalty=1.5, ignore_eos=True, max_output_tokens=5)
    async with open_site(script(t.FinishReason.LENGTH)) as site:
        found = (await site.client.post(PATH, asked)).json()
        sampling = site.cluster.requests[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.min_tokens) == (7, 5, 2)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.5, True)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "hel")


# -- calls and reasoning ----------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for name in ("w1", "w2")
]
ROME, OSLO = '{"city": "Rome \U0001f999"}', '{"city": "Oslo"}'
CALLS = (
    f'I look.\n<tool_call>\n{{"name": "w1", "arguments": {ROME}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "w2", "arguments": {OSLO}}}\n</tool_call>'
)


CALL = {"type": "function_call", "call_id": "c", "name": "w1", "arguments": "{}"}


def text_script(text: str, size: int, reason: t.FinishReason = t.FinishReason.STOP) -> Script:
    ids = ids_of(text)
    return Script(steps=[ids[at : at + size] for at in range(0, len(ids), size)], finish_reason=reason)


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


@pytest.mark.parametrize("size", [1, 4, 500])
async def test_calls_are_items_of_their_own(open_site: OpenSite, size: int) -> None:
    model = served_model(template=templates.HERMES, max_context=4000)
    async with open_site(text_script(CALLS, size), model=model) as site:
        plain = (await site.client.post(PATH, ask(tools=TOOLS))).json()
        events = events_of(await site.client.post(PATH, ask(tools=TOOLS, stream=True)))
    final = events[-1]["response"]
    assert final["status"] == plain["status"] == "completed"
    assert without_ids(final["output"]) == without_ids(plain["output"])
    kinds = [(item["type"], item.get("name")) for item in final["output"]]
    assert kinds == [("message", None), ("function_call", "w1"), ("function_call", "w2")]
    assert [item.get("arguments") for item in final["output"]] == [None, ROME, OSLO]
    assert len({item["id"] for item in final["output"]} | {item.get("call_id") for item in final["output"]}) == 6
    for index, item in enumerate(final["output"]):
        told = [event for event in events if event.get("output_index") == index]
        assert told[0]["type"] == "response.output_item.added"
        assert told[-1] == {**told[-1], "type": "response.output_item.done", "item": item}
        assert "".join(event.get("delta", "") for event in told) == item.get("arguments", "I look.")
        if item["type"] == "function_call":
            assert told[0]["item"] == {**item, "arguments": "", "status": "in_progress"}
            done = told[-2]
            assert (done["type"], done["arguments"]) == ("response.function_call_arguments.done", item["arguments"])
            assert done["name"] == item["name"]
    assert final["tools"][0]["name"] == "w1"


async def test_a_call_that_is_cut_is_incomplete(open_site: OpenSite) -> None:
    model = served_model(template=templates.HERMES, max_context=4000)
    cut = text_script(CALLS[:60], 3, t.FinishReason.LENGTH)
    async with open_site(cut, model=model) as site:
        events = events_of(await site.client.post(PATH, ask(tools=TOOLS, stream=True)))
    final = events[-1]
    assert (final["type"], final["response"]["status"]) == ("response.incomplete", "incomplete")
    assert [item["status"] for item in final["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("size", [1, 7, 500])
async def test_reasoning_is_an_item_before_the_message(open_site: OpenSite, size: int) -> None:
    model = served_model(template=templates.REASONING, max_context=4000)
    async with open_site(text_script("<think>\nhm, hm\n</think>\nhello", size), model=model) as site:
        plain = (await site.client.post(PATH, ask())).json()
        events = events_of(await site.client.post(PATH, ask(stream=True)))
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(plain["output"])
    reasoning, message = final["output"]
    assert (reasoning["type"], reasoning["content"], reasoning["summary"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": "hm, hm"}],
        [],
    )
    assert message["content"][0]["text"] == "hello"
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, hm"
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_conversation_with_calls_and_reasoning_is_read_as_a_chat_is(open_site: OpenSite) -> None:
    items = [
        {"role": "user", "content": "Rome?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "w1",
            "arguments": ROME,
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "w2", "arguments": OSLO},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("c1", "w1", ROME), call("c2", "w2", OSLO)]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    chat_tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}} for tool in TOOLS
    ]
    model = served_model(template=templates.HERMES, max_context=4000)
    async with open_site(model=model, limits={"max_body_bytes": 65_536}) as site:
        ours = await prompt_of(site, PATH, {"model": "m", "input": items, "tools": TOOLS})
        chat = {"model": "m", "messages": messages, "tools": chat_tools}
        assert ours == await prompt_of(site, "/v1/chat/completions", chat)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"text": {"format": {"type": "json_object"}}, "tool_choice": "required"}, "tool_choice"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "w1"}]},
            "input.0.arguments",
        ),
    ],
    ids=str,
)
async def test_what_is_wrong_with_tools_is_told_in_the_callers_names(
    open_site: OpenSite, more: dict[str, Any], param: str
) -> None:
    model = served_model(template=templates.HERMES, max_context=4000)
    async with open_site(model=model) as site:
        reply = await site.client.post(PATH, ask(**{"tools": TOOLS, **more}))
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.json()
