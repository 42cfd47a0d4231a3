"""What a chat template understands, found by rendering small conversations and looking for what should be in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from modelfiles.chat_messages import ChatCall, ChatMessage, ChatTool
from modelfiles.chat_template import ChatTemplate, TemplateError

LONG_ID, SHORT_ID = "call_0123456789abcdef", "a1b2c3d4e"
"""Some templates admit ids of nine letters and digits only."""

_TOOL = ChatTool(
    name="probe_name",
    description="probe description",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
)
_TEXT = '{"probe_key": "probe_value"}'
_OBJECT: Mapping[str, object] = {"probe_key": "probe_value"}
_USER = ChatMessage(role="user", content="probe question")
_RESULT = "probe result"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Neutral values are those of a template that knows user and assistant turns only."""

    has_system: bool = False
    has_tools: bool = False
    """It shows the tools on offer."""
    has_calls: bool = False
    """It shows the calls of assistant turns, and their results as turns of the role `tool`."""
    wants_text_arguments: bool = False
    """Arguments of calls as JSON text, not as objects."""
    wants_content: bool = False
    """An empty text instead of null beside calls."""
    wants_short_ids: bool = False
    wants_single_calls: bool = False
    """One call in a turn: it refuses several, or shows the first of them only."""


def traits_of(template: ChatTemplate) -> TemplateTraits:
    system = _render(template, [ChatMessage(role="system", content="probe rules"), _USER])
    tools = _render(template, [_USER], [_TOOL])
    has_tools = "probe_name" in tools and "probe_key" in tools
    forms: tuple[Mapping[str, object] | str, ...] = (_OBJECT, _TEXT)
    for call_id, arguments, content in product((LONG_ID, SHORT_ID), forms, (None, "")):
        call = ChatCall(call_id=call_id, name="probe_called", arguments=arguments)
        if not _shows_call(_render(template, _exchange(content, call), [_TOOL]), arguments):
            continue
        second = replace(call, call_id=call_id[::-1], name="probe_second")
        return TemplateTraits(
            has_system="probe rules" in system,
            has_tools=has_tools,
            has_calls=True,
            wants_text_arguments=isinstance(arguments, str),
            wants_content=content is not None,
            wants_short_ids=call_id == SHORT_ID,
            wants_single_calls="probe_second" not in _render(template, _exchange(content, call, second), [_TOOL]),
        )
    return TemplateTraits(has_system="probe rules" in system, has_tools=has_tools)


def _exchange(content: str | None, *calls: ChatCall) -> list[ChatMessage]:
    results = [ChatMessage(role="tool", content=_RESULT, call_id=call.call_id) for call in calls]
    return [_USER, ChatMessage(role="assistant", content=content, calls=calls), *results]


def _shows_call(text: str, arguments: Mapping[str, object] | str) -> bool:
    """Whole and as JSON (or piece by piece), not as Python would print it or escaped once more."""
    if "probe_called" not in text or _RESULT not in text or "None" in text or "'probe_called'" in text:
        return False
    if isinstance(arguments, str):
        return _TEXT in text
    return "probe_key" in text and "probe_value" in text and "'probe_key'" not in text


def _render(template: ChatTemplate, messages: Sequence[ChatMessage], tools: Sequence[ChatTool] | None = None) -> str:
    """Nothing where the template refuses."""
    values: dict[str, object] = {
        "messages": [message.turn(lambda value: value) for message in messages],
        "tools": None if tools is None else [tool.value() for tool in tools],
        "add_generation_prompt": True,
    }
    try:
        return template.render(values)
    except TemplateError:
        return ""
