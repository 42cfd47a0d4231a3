"""The HTTP bodies, parsed strictly: no bool for an integer, no NaN, no number in a string.

A null member counts as absent. What is honoured, refused by name or ignored stands in `fields.py`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from core.errors import InvalidRequest
from gateway.fields import ROUTES, neutral_values
from gateway.json_body import load_object
from gateway.strict import STRICT
from gateway.tools.bodies import CallBody, CallId, Calls, Effort, ToolChoice, Tools

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_MESSAGES = 4096
MAX_STOP_CHARS = 1000
MAX_BAD_WORDS = 128
MAX_ERROR_CHARS = 500


_SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}
"""What to say instead of members that are no longer in use."""


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _joined_content(value: object) -> object:
    """Text parts are joined in order, with nothing between; an empty list is an empty text."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError("only parts of type 'text' are supported by this model")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' needs a string member 'text'")
        texts.append(part["text"])
    return "".join(texts)


class Body(BaseModel):
    model_config = STRICT
    route: ClassVar[str] = ""
    """Of a whole body: its rules in gateway/fields.py."""
    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class Message(Body):
    not_built = {"function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Calls | None = None
    content: Annotated[str, BeforeValidator(_joined_content)] | None = Field(default=None, validate_default=True)
    """None only beside `tool_calls`."""
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under its other name."""

    @field_validator("tool_calls")
    @classmethod
    def _of_an_assistant(cls, value: list[CallBody] | None, info: ValidationInfo) -> list[CallBody] | None:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only an assistant turn makes calls")
        return value

    @field_validator("content")
    @classmethod
    def _some_content(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return value

    @property
    def thought(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[object, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """An answer follows the schema either way."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, object] | None = None
    """Of a structural tag."""


class StructuredOutputs(Body):
    """Exactly one of the first six."""

    not_built = {"whitespace_pattern": (), "disable_fallback": (False, True), "disable_additional_properties": (False,)}

    json_: Annotated[object, Field(alias="json")] = None
    """A schema, or the text of one."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: object = None
    disable_any_whitespace: bool | None = None
    """JSON is written on one line as `json.dumps` writes it. False allows bounded white space wherever JSON has it."""


class SamplingBody(Body):
    """What all routes that generate have in common. Limits that the operator sets are checked in `parse.py`."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT64)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float = Field(default=0, ge=-2, le=2)
    presence_penalty: float = Field(default=0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    seed: int | None = Field(default=None, ge=-INT64 - 1, le=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], BeforeValidator(_one_or_many)
    ] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0, le=INT64)
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-INT32 - 1, le=INT32)
    """Lower is served first."""
    cache_salt: Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None
    """Requests with another salt share no cached blocks with this one."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: object = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerationBody(SamplingBody):
    """What chat and text completions have in common."""

    n: int = Field(default=1, ge=1, le=128)
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=INT64)
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT64)] | Literal[-1] | None = None
    truncation_side: Literal["left", "right"] = "left"
    response_format: ResponseFormat | None = None


class ChatBody(GenerationBody):
    route = "chat"
    not_built = neutral_values(route)

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1, le=INT64)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT64)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=INT64)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Silence is `auto` where there are tools."""
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True


class CompletionBody(GenerationBody):
    route = "completions"
    not_built = neutral_values(route)

    prompt: str | list[object]
    max_tokens: int = Field(default=16, ge=0, le=INT64)
    logprobs: int | None = Field(default=None, ge=0, le=INT64)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=INT32)
    """Only as many as `n`: no ranking of hidden choices."""
    add_special_tokens: bool = True


class TokenizeBody(Body):
    """Text or chat: exactly one of `prompt` and `messages`."""

    route = "tokenize"
    not_built = neutral_values(route)

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    route = "detokenize"

    model: str | None = None
    tokens: list[int]


_REASONS = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
}
"""Where pydantic speaks of Python."""
SomeBody = TypeVar("SomeBody", bound=Body)


def parse_body(
    cls: type[SomeBody], raw: bytes, on_unknown: Callable[[str, list[str]], None] = lambda route, names: None
) -> SomeBody:
    """The body as `cls`, or InvalidRequest that names the member. Never echoes what the caller sent.

    ``on_unknown`` is told of members that stand in no rule; it may raise.
    """
    value = load_object(raw)
    unknown = [name for name in value if name not in ROUTES[cls.route]]
    if unknown:
        on_unknown(cls.route, unknown)
    return read_members(cls, value)


def read_members(cls: type[SomeBody], value: Mapping[str, object]) -> SomeBody:
    """The members as `cls`. Raises InvalidRequest."""
    _refuse_not_built(cls, value, "")
    messages = value.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                if message.get("role") == "function":
                    raise _unsupported(f"messages.{index}.role", "'function' is not supported; use the role 'tool'")
                _refuse_not_built(Message, message, f"messages.{index}.")
    structured = value.get("structured_outputs")
    if isinstance(structured, dict):
        _refuse_not_built(StructuredOutputs, structured, "structured_outputs.")
    present = {name: member for name, member in value.items() if member is not None}
    if present.get("continue_final_message") is True and present.get("add_generation_prompt") is True:
        raise InvalidRequest(
            "'add_generation_prompt' and 'continue_final_message' exclude each other",
            param="add_generation_prompt",
            code="invalid_value",
        )
    return validated(cls, present)


def validated(cls: type[SomeBody], members: Mapping[str, object]) -> SomeBody:
    """The members as `cls`, or InvalidRequest that names the one at fault."""
    try:
        return cls.model_validate(members)
    except ValidationError as error:
        raise _first_error(error.errors(include_url=False, include_input=False, include_context=False)[0]) from None


def _refuse_not_built(cls: type[Body], value: Mapping[str, object], prefix: str) -> None:
    for name, neutral in cls.not_built.items():
        given = value.get(name)
        if given is not None and given not in neutral:
            remedy = f"use '{_SUCCESSORS[name]}'" if name in _SUCCESSORS else "leave it out"
            raise _unsupported(f"{prefix}{name}", f"'{prefix}{name}' is not supported; {remedy}")


def _unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def _first_error(error: ErrorDetails) -> InvalidRequest:
    # Pydantic names the branches of a union in the path; callers know members only.
    path = ".".join(str(part) for part in error["loc"] if part != "str" and not str(part).startswith("list["))
    if error["type"] == "missing":
        return InvalidRequest(f"'{path}' is required", param=path, code="missing_required_parameter")
    reason = _REASONS.get(error["type"], error["msg"].removeprefix("Value error, ")[:MAX_ERROR_CHARS])
    return InvalidRequest(f"'{path}': {reason[:1].lower()}{reason[1:]}", param=path, code="invalid_value")
