"""Calls and reasoning in the answers of the chat route, over a scripted cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import types as t
from gateway.models import ServedModel
from modelfiles import Tokenizer
from tests.support import tool_templates as templates
from tests.support.call_texts import any_text
from tests.support.marked_tokenizer import marked_tokenizer
from tests.support.scripted import Script
from tests.support.site import open_site as open_a_site
from tests.support.site import served_model
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.unit.gateway.conftest import OpenSite

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
W1, W2 = (
    {"type": "function", "function": {"name": name, "description": "How it is", "parameters": PARAMETERS}}
    for name in ("w1", "w2")
)
ROME, OSLO = '{"city": "Rome \U0001f999"}', '{"city": "Oslo"}'
LOGPROBS = t.TokenLogprobs(logprob=-0.5, rank=1, top=((40, -0.5),))
FORMS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": (
        templates.HERMES,
        (),
        f'I look.\n<tool_call>\n{{"name": "w1", "arguments": {ROME}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "w2", "arguments": {OSLO}}}\n</tool_call>',
    ),
    "hermes, marks in the vocabulary": (
        templates.HERMES,
        ("<tool_call>", "</tool_call>"),
        f'I look.<tool_call>{{"name": "w1", "arguments": {ROME}}}</tool_call>'
        f'<tool_call>{{"name": "w2", "arguments": {OSLO}}}</tool_call>',
    ),
    "no tools in the template": (
        templates.NO_TOOLS,
        (),
        f'I look. <tool_call>{{"name": "w1", "arguments": {ROME}}}{{"name": "w2", "arguments": {OSLO}}}</tool_call>',
    ),
    "llama3": (
        templates.LLAMA3,
        ("<|python_tag|>",),
        f'I look.<|python_tag|>{{"name": "w1", "parameters": {ROME}}}; {{"name": "w2", "parameters": {OSLO}}}',
    ),
    "mistral": (
        templates.MISTRAL,
        ("[TOOL_CALLS]",),
        f'I look.[TOOL_CALLS][{{"name": "w1", "arguments": {ROME}}}, {{"name": "w2", "arguments": {OSLO}}}]',
    ),
    "mistral with names": (
        templates.MISTRAL,
        ("[TOOL_CALLS]", "[ARGS]"),
        f"I look.[TOOL_CALLS]w1[ARGS]{ROME}[TOOL_CALLS]w2[ARGS]{OSLO}",
    ),
}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Rome?"}], "tools": [W1, W2], **more}


def model(template: str, tokenizer: Tokenizer | None = None) -> ServedModel:
    return served_model(tokenizer, template=template, max_context=4000)


def script(text: str, tokenizer: Tokenizer | None = None, *, size: int = 1, **more: Any) -> Script:
    ids = (tokenizer or tiny_tokenizer()).encode(text, parse_special=True)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    return Script(steps=steps, **{"finish_reason": t.FinishReason.STOP, **more})


def assembled(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message and the reason of a stream with one choice, put together as clients do. Checks each chunk's form."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    reason = ""
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for event in events[1:-1]:
        if not event["choices"]:
            continue
        (choice,) = event["choices"]
        reason = choice["finish_reason"] or reason
        for key, value in choice["delta"].items():
            assert value, "no empty piece"
            if key == "tool_calls":
                (piece,) = value
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert piece["function"]["arguments"] == ""
                    assert set(piece) == {"index", "id", "type", "function"}
                    calls.append({key: piece[key] for key in ("id", "type", "function")})
                else:
                    assert set(piece) == {"index", "function"}
                    assert set(piece["function"]) == {"arguments"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            else:
                message[key] = (message.get(key) or "") + value
    assert events[-1] == "[DONE]"
    assert reason
    return message, reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") for call in calls)
    return message | {"tool_calls": [call | {"id": ""} for call in calls]}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("form", FORMS)
async def test_bug_047_parallel_calls_have_their_own_index_in_every_format(
    open_site: OpenSite, form: str, size: int
) -> None:
    template, marks, text = FORMS[form]
    tokenizer = marked_tokenizer(*marks, special=True)
    async with open_site(script(text, tokenizer, size=size), model=model(template, tokenizer)) as site:
        plain = (await site.client.post(CHAT, ask())).json()
        events = (await site.client.post(CHAT, ask(stream=True))).events()
    choice = plain["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "w1", "arguments": ROME}, {"name": "w2", "arguments": OSLO}]
    message, reason = assembled(events)
    assert (without_ids(message), reason) == (without_ids(choice["message"]), "tool_calls")
    assert plain["usage"]["completion_tokens"] == len(tokenizer.encode(text, parse_special=True))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("cut", "finish", "more"),
    [
        (12, t.FinishReason.LENGTH, {}),
        (1, t.FinishReason.LENGTH, {}),
        (12, t.FinishReason.STOP, {}),
        (0, t.FinishReason.STOP, {"stop": ["Oslo"]}),
    ],
    ids=["length in arguments", "length behind arguments", "stop in arguments", "stop string in arguments"],
)
async def test_bug_046_a_call_that_is_cut_is_not_reported_as_made(
    open_site: OpenSite, stream: bool, cut: int, finish: t.FinishReason, more: dict[str, Any]
) -> None:
    text = f'<tool_call>{{"name": "w1", "arguments": {OSLO}}}</tool_call>'
    text = text[: text.index("}}") + 2 - cut] if cut else text
    async with open_site(script(text, finish_reason=finish), model=model(templates.HERMES)) as site:
        reply = await site.client.post(CHAT, ask(stream=stream, **more))
    if stream:
        message, reason = assembled(reply.events())
    else:
        message, reason = reply.json()["choices"][0]["message"], reply.json()["choices"][0]["finish_reason"]
    assert reason == finish
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "w1"
    assert OSLO.startswith(call["function"]["arguments"])


@settings(max_examples=25, deadline=None)
@given(
    text=any_text, size=st.integers(1, 9), form=st.sampled_from(list(FORMS)), stop=st.sampled_from([None, "}", "te"])
)
def test_the_joined_stream_is_the_plain_answer_for_any_text(text: str, size: int, form: str, stop: str | None) -> None:
    template, marks, _ = FORMS[form]
    tokenizer = marked_tokenizer(*marks, special=True)
    served = model(template + "{# </think> #}" * (size % 2), tokenizer)  # a source that speaks of reasoning, or not

    async def both() -> tuple[Any, Any]:
        async with open_a_site(script(text or "x", tokenizer, size=size), model=served) as site:
            plain = await site.client.post(CHAT, ask(stop=stop))
            return plain.json(), (await site.client.post(CHAT, ask(stop=stop, stream=True))).events()

    plain, events = asyncio.run(both())
    choice = plain["choices"][0]
    message, reason = assembled(events)
    told = without_ids(choice["message"])
    assert (without_ids(message) | {"content": message["content"] or ""}, reason) == (
        told | {"content": told["content"] or ""},
        choice["finish_reason"],
    )
    if reason == "tool_calls":
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in message["tool_calls"])


async def test_a_call_of_a_function_that_nobody_offered_is_content(open_site: OpenSite) -> None:
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    async with open_site(script(text), model=model(templates.HERMES)) as site:
        choice = (await site.client.post(CHAT, ask())).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("more", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
async def test_text_that_looks_like_a_call_is_content_when_none_may_be_made(
    open_site: OpenSite, more: dict[str, Any]
) -> None:
    text = '<tool_call>{"name": "w1", "arguments": {}}</tool_call>'
    async with open_site(script(text), model=model(templates.HERMES)) as site:
        answer = (await site.client.post(CHAT, ask(**more, return_token_ids=True))).json()
        bare = (await site.client.post(CHAT, {**ask(return_token_ids=True), "tools": None})).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["prompt_token_ids"] == bare["prompt_token_ids"]


async def test_without_parallel_calls_one_call_is_returned(open_site: OpenSite) -> None:
    text = FORMS["hermes"][2]
    async with open_site(script(text), model=model(templates.HERMES)) as site:
        body = ask(parallel_tool_calls=False)
        choice = (await site.client.post(CHAT, body)).json()["choices"][0]
        message, reason = assembled((await site.client.post(CHAT, body | {"stream": True})).events())
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["w1"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert (without_ids(message), reason) == (without_ids(choice["message"]), "tool_calls")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "w2"}}}, "stop"),
    ],
)
async def test_forced_calls_are_a_list_that_a_grammar_asks_for(
    open_site: OpenSite, more: dict[str, Any], reason: str
) -> None:
    text = f'[{{"name": "w2", "arguments": {OSLO}}}]'
    async with open_site(script(text), model=model(templates.HERMES)) as site:
        plain = (await site.client.post(CHAT, ask(**more))).json()["choices"][0]
        message, streamed_reason = assembled((await site.client.post(CHAT, ask(**more, stream=True))).events())
        grammars = {request.sampling.grammar for request in site.cluster.requests}
    assert plain["message"]["content"] is None
    assert plain["message"]["tool_calls"][0]["function"] == {"name": "w2", "arguments": OSLO}
    assert (without_ids(message), streamed_reason) == (without_ids(plain["message"]), plain["finish_reason"])
    assert plain["finish_reason"] == reason
    (grammar,) = grammars
    names = json.loads(json.loads(grammar)["source"])["items"]
    assert ('"w1"' in json.dumps(names)) == (reason == "tool_calls")


async def test_logprobs_and_ids_of_hidden_text_are_all_sent(open_site: OpenSite) -> None:
    text = FORMS["hermes"][2]
    ids = tiny_tokenizer().encode(text, parse_special=True)
    body = ask(logprobs=True, return_token_ids=True)
    given = script(text, logprobs=lambda token_id: LOGPROBS)
    async with open_site(given, model=model(templates.HERMES)) as site:
        plain = (await site.client.post(CHAT, body)).json()["choices"][0]
        events = (await site.client.post(CHAT, body | {"stream": True})).events()
    assert plain["token_ids"] == ids
    assert len(plain["logprobs"]["content"]) == len(ids)
    choices = [choice for event in events[1:-1] for choice in event["choices"]]
    assert [one for choice in choices for one in choice["token_ids"]] == ids
    streamed = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert streamed == plain["logprobs"]["content"]


async def test_choices_are_read_apart(open_site: OpenSite) -> None:
    text, other = FORMS["hermes"][2], "no call"
    ids = tiny_tokenizer().encode(other, parse_special=True)
    async with open_site(script(text, others=[[ids]]), model=model(templates.HERMES)) as site:
        answer = (await site.client.post(CHAT, ask(n=2))).json()
        events = (await site.client.post(CHAT, ask(n=2, stream=True))).events()
    first, second = answer["choices"]
    assert (len(first["message"]["tool_calls"]), first["finish_reason"]) == (2, "tool_calls")
    assert (second["message"]["content"], second["finish_reason"]) == (other, "stop")
    for index, expected in enumerate((first, second)):
        own = [one for one in events[:-1] if one["choices"][0]["index"] == index]
        message, reason = assembled([*own, "[DONE]"])
        assert (without_ids(message), reason) == (without_ids(expected["message"]), expected["finish_reason"])


# -- reasoning --------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nRome is warm.\n</think>\n\n"
CALL = f'<tool_call>{{"name": "w1", "arguments": {ROME}}}</tool_call>'


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("behind", ["Yes.", CALL, ""])
async def test_reasoning_stands_in_its_own_member(open_site: OpenSite, behind: str, special: bool, size: int) -> None:
    tokenizer = marked_tokenizer("<think>", "</think>", special=special)
    given = script(THOUGHT + behind, tokenizer, size=size)
    options = {"stream_options": {"include_usage": True}, "stream": True}
    async with open_site(given, model=model(templates.REASONING, tokenizer)) as site:
        plain = (await site.client.post(CHAT, ask())).json()
        events = (await site.client.post(CHAT, ask(**options))).events()
    choice = plain["choices"][0]
    assert choice["message"]["reasoning_content"] == "Rome is warm."
    assert choice["message"]["content"] == ("Yes." if behind == "Yes." else None)
    assert len(choice["message"].get("tool_calls", [])) == (behind == CALL)
    message, reason = assembled(events)
    assert (without_ids(message), reason) == (without_ids(choice["message"]), choice["finish_reason"])
    details = plain["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(tokenizer.encode(THOUGHT.rstrip(), parse_special=True))
    assert events[-2]["usage"] == plain["usage"]


async def test_reasoning_that_the_prompt_opened_begins_at_once(open_site: OpenSite) -> None:
    tokenizer = marked_tokenizer("<think>", "</think>", special=False)
    given = script("Rome is warm.</think>Yes.", tokenizer)
    async with open_site(given, model=model(templates.OPENED_REASONING, tokenizer)) as site:
        message = (await site.client.post(CHAT, ask(tools=None))).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rome is warm.", "Yes.")


async def test_reasoning_may_be_left_out(open_site: OpenSite) -> None:
    async with open_site(script(THOUGHT + "Yes."), model=model(templates.REASONING)) as site:
        plain = (await site.client.post(CHAT, ask(include_reasoning=False))).json()
        events = (await site.client.post(CHAT, ask(include_reasoning=False, stream=True))).events()
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert assembled(events)[0] == plain["choices"][0]["message"]
    assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_reasoning_is_switched_by_effort_or_template(
    open_site: OpenSite, more: dict[str, Any], thinks: bool
) -> None:
    async with open_site(script("<think>x</think>y"), model=model(templates.REASONING)) as site:
        answer = (await site.client.post(CHAT, ask(tools=None, return_token_ids=True, **more))).json()
        counted = (await site.client.post("/tokenize", ask(tools=None, **more))).json()
    prompt = tiny_tokenizer().decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("</think>\n\n") is not thinks
    assert counted["tokens"] == answer["prompt_token_ids"]
    # A prompt that has closed the block is not followed by another one.
    assert answer["choices"][0]["message"]["content"] == ("y" if thinks else "<think>x</think>y")
