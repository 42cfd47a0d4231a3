"""The members of a body that concern tools, as the OpenAI API writes them."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gateway.strict import STRICT

MAX_CALLS = 128
"""Calls in one assistant turn."""
MAX_DEPTH = 32
"""Of values that a template walks through."""
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = STRICT


class FunctionBody(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, object] | None = None
    """The JSON schema of an object; absent: there are no arguments."""
    strict: bool | None = None


class ToolBody(_Strict):
    type: Literal["function"]
    function: FunctionBody


class CalledFunctionBody(_Strict):
    name: Name
    arguments: str
    """JSON text of an object."""


class CallBody(_Strict):
    """A call in an assistant turn: what an answer of ours said, sent back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunctionBody


class NamedFunctionBody(_Strict):
    name: Name


class ToolChoiceBody(_Strict):
    """A word, or the one function to call."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunctionBody | None = None


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Tools = list[ToolBody]
ToolChoice = Annotated[ToolChoiceBody, BeforeValidator(_as_choice)]
Calls = Annotated[list[CallBody], Field(max_length=MAX_CALLS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def is_shallow(value: object, depth: int = 0) -> bool:
    """Whether a template may walk through it."""
    if depth > MAX_DEPTH:
        return False
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(is_shallow(member, depth + 1) for member in members)
