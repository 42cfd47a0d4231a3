"""From a response request to the chat request that means the same, and back from its errors to the caller's names."""

import re
from collections.abc import Mapping
from dataclasses import replace

from core.config import LimitsConfig
from core.errors import InvalidRequest, RequestError
from gateway.models import ServedModel
from gateway.parse import Job, chat_job
from gateway.responses.body import LOGPROBS, ResponsesBody
from gateway.schemas import ChatBody, SamplingBody, read_members

Fields = dict[str, object]

_TEXT_PARTS = ("input_text", "output_text", "text")
_RENAMED: tuple[tuple[str, str], ...] = (
    (r"max_completion_tokens", "max_output_tokens"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"(tools\.\d+)\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)
"""Members of a chat body, and where a caller of this route wrote them."""


class Conversation:
    """The messages that items make."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self.places: dict[str, str] = {}
        """Where the caller wrote what stands at a path of the messages."""
        self._reasoning: str | None = None

    def add(self, item: object, place: str) -> None:
        """Raises InvalidRequest that names the member."""
        if not isinstance(item, dict):
            raise InvalidRequest(f"'{place}' must be an item of a conversation", param=place, code="invalid_value")
        kind = item.get("type", "message")
        match kind:
            case "message":
                message: Fields = {
                    "role": item.get("role"),
                    "content": _content(item.get("content"), f"{place}.content"),
                }
                self._put(message, place)
            case "function_call":
                self._add_call(item, place)
            case "function_call_output":
                content = _content(item.get("output"), f"{place}.output")
                self._put({"role": "tool", "tool_call_id": item.get("call_id"), "content": content}, place)
            case "reasoning":
                self._reasoning = _reasoning(item, place)
            case _:
                raise _unsupported(
                    f"{place}.type",
                    "items of this type are not supported: 'message', 'function_call', 'function_call_output' and "
                    "'reasoning' are",
                )

    def _add_call(self, item: Mapping[str, object], place: str) -> None:
        """Calls belong to the assistant's turn that they follow."""
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call: Fields = {"id": item.get("call_id"), "type": "function", "function": function}
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning is not None:
            last = {"role": "assistant", "content": None}
            self._put(last, place)
        calls = last.setdefault("tool_calls", [])
        assert isinstance(calls, list), "ours"
        path = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"
        self.places |= {f"{path}.function": place, f"{path}.id": f"{place}.call_id", path: place}
        calls.append(call)

    def _put(self, message: Fields, place: str) -> None:
        if self._reasoning is not None and message["role"] == "assistant":
            message["reasoning_content"], self._reasoning = self._reasoning, None
        path = f"messages.{len(self.messages)}"
        self.places |= {f"{path}.tool_call_id": f"{place}.call_id", path: place}
        self.messages.append(message)


class ResponseRequest:
    """One request, and what its response repeats of it."""

    def __init__(self, body: ResponsesBody, model: ServedModel) -> None:
        self._body = body
        self._model = model

    def job(self, limits: LimitsConfig) -> Job:
        """Blocking (template, tokenizer). Raises RequestError in the caller's names."""
        chat, places = chat_body(self._body)
        try:
            job = chat_job(chat, self._model, limits)
        except RequestError as error:
            raise renamed(error, places) from None
        return replace(job, grammar_member="text.format") if job.grammar_member == "response_format" else job

    def about(self, job: Job) -> Fields:
        """The members of the response that say what was asked, with the values that were in effect."""
        body = self._body
        given = body.model_dump(by_alias=True, include={"tools", "tool_choice", "reasoning", "text", "metadata"})
        return {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": given["reasoning"],
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": job.sampling.temperature,
            "text": {"format": _without_none(given["text"]["format"]), "verbosity": body.text.verbosity},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": job.sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }


def chat_body(body: ResponsesBody) -> tuple[ChatBody, Mapping[str, str]]:
    """The chat request, and the places of its messages for `renamed`. Raises InvalidRequest in the caller's names."""
    conversation = Conversation()
    if body.instructions is not None:
        conversation.add({"role": "system", "content": body.instructions}, "instructions")
    if isinstance(body.input, str):
        conversation.add({"role": "user", "content": body.input}, "input")
    else:
        for index, item in enumerate(body.input):
            conversation.add(item, f"input.{index}")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options", code="invalid_value")
    wants_logprobs = LOGPROBS in body.include
    if body.top_logprobs and not wants_logprobs:
        raise InvalidRequest(
            f"'top_logprobs' needs 'include': [\"{LOGPROBS}\"]", param="top_logprobs", code="invalid_value"
        )
    shared = set(SamplingBody.model_fields) & body.model_fields_set
    asked = body.model_dump(include=shared, by_alias=True, exclude_none=True)
    asked |= {
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body),
        "logprobs": wants_logprobs,
        "top_logprobs": (body.top_logprobs or 0) if wants_logprobs else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": body.reasoning.effort,
    }
    if body.tools:
        asked |= {"tools": [_tool(one) for one in body.model_dump(include={"tools"})["tools"]]}
        asked |= {"tool_choice": _tool_choice(body), "parallel_tool_calls": body.parallel_tool_calls}
    elif body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("'tool_choice' needs 'tools'", param="tool_choice", code="invalid_value")
    try:
        return read_members(ChatBody, asked), conversation.places
    except RequestError as error:
        raise renamed(error, conversation.places) from None


def renamed(error: RequestError, places: Mapping[str, str]) -> RequestError:
    """The error in the words of this route: its members instead of those of the chat request."""

    def rename(text: str) -> str:
        for path in sorted(places, key=len, reverse=True):
            text = re.sub(rf"\b{re.escape(path)}\b", places[path], text)
        text = re.sub(r"\bmessages\b", "input", text)
        for pattern, name in _RENAMED:
            text = re.sub(rf"\b{pattern}\b", name, text)
        return text

    quoted = re.sub(r"'[a-z_0-9.]+'", lambda found: rename(found[0]), error.message)
    param = None if error.param is None else rename(error.param)
    return type(error)(quoted, param=param, code=error.code, worker_id=error.worker_id)


def _content(value: object, place: str) -> object:
    """Text as it is; parts joined. What is no text is left to the chat's own checks."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind in _TEXT_PARTS else "refusal") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise _unsupported(f"{place}.{index}.type", "only parts of text are supported by this model")
        if not isinstance(text, str):
            raise InvalidRequest(f"'{place}.{index}' needs a text", param=f"{place}.{index}", code="invalid_value")
        texts.append(text)
    return "".join(texts)


def _reasoning(item: Mapping[str, object], place: str) -> str | None:
    """The text of a block of reasoning that is sent back; None when only a sealed form of it came."""
    content = item.get("content")
    if content is None:
        return None
    if not isinstance(content, list):
        raise InvalidRequest(
            f"'{place}.content' must be a list of parts", param=f"{place}.content", code="invalid_value"
        )
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"'{place}.content': a part needs a text", param=f"{place}.content", code="invalid_value")
    return "".join(map(str, texts)) or None


def _response_format(body: ResponsesBody) -> Fields | None:
    form = body.text.format
    if form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": form.type}
    members = form.model_dump(include={"name", "schema_", "description", "strict"}, by_alias=True, exclude_unset=True)
    return {"type": form.type, "json_schema": members}


def _tool(tool: Fields) -> Fields:
    kind = tool.pop("type")
    return {"type": kind, "function": {name: value for name, value in tool.items() if value is not None}}


def _tool_choice(body: ResponsesBody) -> object:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": choice.type, "function": {"name": choice.name}}


def _without_none(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}': {message}", param=param, code="unsupported_parameter")
