"""A conversation as its model's template wants it: tools, calls and results in the template's way or in ours.

Where the template does not show tools, the system turn says what they are and how to call them, calls stand in the text
of assistant turns, and results in user turns. Everything of a user's stays text: marks are made by the template alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import takewhile

import orjson

from core.errors import InvalidRequest
from gateway.models import ServedModel
from gateway.schemas import ChatBody, Message, TokenizeBody
from gateway.tools.bodies import MAX_DEPTH, CallBody, is_shallow
from gateway.tools.dialect import Dialect
from gateway.tools.plan import Plan
from modelfiles import ChatCall, ChatMessage, ChatTool, RenderedChat, TemplateError

SHORT_ID_CHARS = 9


def render(body: ChatBody | TokenizeBody, model: ServedModel, plan: Plan) -> RenderedChat:
    """The prompt of a conversation. Blocking. Raises InvalidRequest."""
    if model.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
    turns, tools = with_tools(
        turns_of(body.messages or (), model.dialect), plan.tools, model.dialect, parallel=plan.parallel
    )
    if body.continue_final_message and turns[-1].content is None:
        raise _refuse("continue_final_message", "the final message has no content")
    try:
        return model.template.encode(
            model.tokenizer,
            turns,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=plan.variables,
            add_special_tokens=bool(body.add_special_tokens),
        )
    except TemplateError as error:
        raise InvalidRequest(str(error), param="messages", code="invalid_value") from None


def turns_of(messages: Sequence[Message], dialect: Dialect) -> list[ChatMessage]:
    """The turns as they were sent, checked. `developer` is `system` to a template. Raises InvalidRequest."""
    names: dict[str, str] = {}
    turns: list[ChatMessage] = []
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        calls = tuple(
            _call(call, f"{place}.tool_calls.{number}", dialect) for number, call in enumerate(message.tool_calls or ())
        )
        is_result = message.role == "tool"
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        turns.append(
            ChatMessage(
                role="system" if message.role == "developer" else message.role,
                content=message.content,
                name=_answered(message, place, names) if is_result else message.name,
                calls=calls,
                call_id=_call_id(message.tool_call_id, dialect) if is_result and message.tool_call_id else None,
                reasoning=message.thought if message.role == "assistant" else None,
            )
        )
    return turns


def with_tools(
    turns: Sequence[ChatMessage], tools: Sequence[ChatTool], dialect: Dialect, *, parallel: bool
) -> tuple[list[ChatMessage], Sequence[ChatTool] | None]:
    """The turns for the template, and the tools for it (None: it is told of none)."""
    if dialect.is_taught:
        shown = _with_single_calls(turns) if dialect.traits.wants_single_calls else list(turns)
        if dialect.traits.wants_content:
            shown = [replace(turn, content=turn.content or "") for turn in shown]
        return shown, tools or None
    plain = [_as_text(turn) for turn in turns]
    if tools:
        plain = _instructed(plain, instruction(tools, parallel=parallel), dialect)
    return _joined_results(plain), None


# -- what was sent ----------------------------------------------------------------------------------------------------


def _answered(message: Message, place: str, names: Mapping[str, str]) -> str:
    """The name of the function whose result a turn brings: some templates show it."""
    if message.tool_call_id is None:
        raise InvalidRequest(
            f"'{place}.tool_call_id' is required: the id of the call that is answered",
            param=f"{place}.tool_call_id",
            code="missing_required_parameter",
        )
    name = names.get(message.tool_call_id)
    if name is None:
        raise _refuse(f"{place}.tool_call_id", "no assistant turn before it made a call with this id")
    return name


def _call(call: CallBody, place: str, dialect: Dialect) -> ChatCall:
    param = f"{place}.function.arguments"
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        raise _refuse(param, "not valid JSON") from None
    if not isinstance(arguments, dict) or not is_shallow(arguments):
        raise _refuse(param, f"must be the JSON text of an object, at most {MAX_DEPTH} deep")
    as_text = dialect.is_taught and dialect.traits.wants_text_arguments
    return ChatCall(
        call_id=_call_id(call.id, dialect),
        name=call.function.name,
        arguments=call.function.arguments or "{}" if as_text else arguments,
    )


def _call_id(given: str, dialect: Dialect) -> str:
    """Templates that admit nine letters and digits only get as many, always the same for one id."""
    is_short = len(given) == SHORT_ID_CHARS and given.isascii() and given.isalnum()
    if is_short or not dialect.traits.wants_short_ids:
        return given
    return sha256(given.encode()).hexdigest()[:SHORT_ID_CHARS]


def _refuse(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}': {reason}", param=param, code="invalid_value")


# -- in the template's way --------------------------------------------------------------------------------------------


def _with_single_calls(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Each call is a turn of its own, followed by its results."""
    single: list[ChatMessage] = []
    rest = list(turns)
    while rest:
        turn = rest.pop(0)
        if len(turn.calls) < 2:
            single.append(turn)
            continue
        results = list(takewhile(lambda one: one.role == "tool", rest))
        del rest[: len(results)]
        for index, call in enumerate(turn.calls):
            alone = replace(turn, calls=(call,))
            single.append(alone if index == 0 else replace(alone, content=None, reasoning=None))
            single += [result for result in results if result.call_id == call.call_id]
            results = [result for result in results if result.call_id != call.call_id]
        single += results
    return single


# -- in our own way ---------------------------------------------------------------------------------------------------


def instruction(tools: Sequence[ChatTool], *, parallel: bool) -> str:
    """What a model is told of tools when its template has no words for them."""
    listed = "\n".join(_dumps(tool.value()["function"]) for tool in tools)
    several = "For several calls write several blocks." if parallel else "Make at most one call in an answer."
    return (
        "You have functions that you can call when they help to answer. Each line between <tools> and </tools> is one: "
        "its name, what it does, and the JSON schema of its arguments.\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, answer with a block of this form, the arguments as its schema says:\n"
        '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>\n'
        f"{several} The result of a call comes to you between <tool_response> and </tool_response>."
    )


def _as_text(turn: ChatMessage) -> ChatMessage:
    """Calls and results as text of turns that every template knows."""
    if turn.calls:
        blocks = [
            f"<tool_call>\n{_dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
            for call in turn.calls
        ]
        content = "\n".join([turn.content, *blocks] if turn.content else blocks)
        return replace(turn, content=content, calls=())
    if turn.role == "tool":
        return ChatMessage(
            role="user", content=f"<tool_response>\n{turn.content}\n</tool_response>", call_id=turn.call_id
        )
    return turn


def _instructed(turns: list[ChatMessage], text: str, dialect: Dialect) -> list[ChatMessage]:
    """The instruction goes behind the caller's own system text; without system turns it opens the first user turn."""
    first = turns[0]
    if first.role == "system":
        return [replace(first, content=f"{first.content}\n\n{text}"), *turns[1:]]
    if dialect.traits.has_system:
        return [ChatMessage(role="system", content=text), *turns]
    return [replace(first, content=f"{text}\n\n{first.content}"), *turns[1:]]


def _joined_results(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Results of one assistant turn are one user turn: many templates want the roles to alternate."""
    joined: list[ChatMessage] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if turn.role == "user" and turn.call_id is not None and last is not None and last.call_id is not None:
            joined[-1] = replace(last, content=f"{last.content}\n{turn.content}")
        else:
            joined.append(turn)
    return [replace(turn, call_id=None) for turn in joined]


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
