"""The body of a response request. Nothing is stored here: what would need a store is refused by name."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gateway.fields import neutral_values
from gateway.schemas import INT64, Body, SamplingBody

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class TextFormat(Body):
    """As `response_format` of a chat, with the members of a schema lying flat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema_: Annotated[object, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted and ignored."""


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: Name


class ReasoningOptions(Body):
    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {"generate_summary": ("auto",)}

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    """Reasoning is shown as it is; there are no summaries."""


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = None
    """Accepted and ignored."""


class ResponsesBody(SamplingBody):
    """`input` is a text, or the items of a conversation (read in `conversation.py`)."""

    route = "responses"
    not_built = neutral_values(route)

    input: str | Annotated[list[object], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT64)
    max_tool_calls: int | None = Field(default=None, ge=1, le=INT64)
    """Of tools that the server runs; there are none."""
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    top_logprobs: int | None = Field(default=None, ge=0, le=INT64)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    """Reasoning travels as plain text, so the second asks for nothing."""
    metadata: Metadata = Field(default_factory=dict)
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    """Labels: repeated in the response."""
