"""What a chat template is given: turns, the calls in them, and the tools on offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A call of a tool that an assistant turn made. `arguments` is an object, or its JSON text for templates that want
    that."""

    call_id: str
    name: str
    arguments: Mapping[str, object] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `role` must be on the caller's whitelist: it reaches the template as it is."""

    role: str
    content: str | None
    """None only beside calls."""
    name: str | None = None
    calls: tuple[ChatCall, ...] = ()
    call_id: str | None = None
    """Of the call that a turn of the role `tool` answers."""
    reasoning: str | None = None
    """What an assistant turn thought before its content; templates may drop it."""

    def turn(self, mark: Callable[[object], object]) -> dict[str, object]:
        """As templates expect it; what is absent is no member. `mark` is applied to what users wrote."""
        turn: dict[str, object] = {"role": self.role, "content": mark(self.content)}
        if self.name is not None:
            turn["name"] = mark(self.name)
        if self.calls:
            turn["tool_calls"] = [
                {
                    "id": mark(call.call_id),
                    "type": "function",
                    "function": {"name": mark(call.name), "arguments": mark(call.arguments)},
                }
                for call in self.calls
            ]
        if self.call_id is not None:
            turn["tool_call_id"] = mark(self.call_id)
        if self.reasoning is not None:
            turn["reasoning_content"] = mark(self.reasoning)
        return turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, object] | None

    def value(self, mark: Callable[[object], object] = lambda value: value) -> dict[str, object]:
        """As the OpenAI API writes it and templates expect it."""
        function: dict[str, object] = {"name": mark(self.name)}
        if self.description is not None:
            function["description"] = mark(self.description)
        if self.parameters is not None:
            function["parameters"] = mark(self.parameters)
        return {"type": "function", "function": function}
