"""The grammars of calls and of what follows reasoning.

Calls that must be made are a list of ``{"name": ..., "arguments": ...}``, each by its own schema. The list is the same
for every model: a grammar cannot ask for marks that are special tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from core.errors import InvalidRequest
from core.grammar import GrammarKind, GrammarSource
from gateway.json_schema import narrowed
from gateway.tools.dialect import Dialect, ToolFormat
from gateway.tools.reasoning import CLOSE, OPEN
from modelfiles import ChatTool

MAX_FORCED_CALLS = 16
"""In one answer: a small model would go on for ever."""
_NONE: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Mapping[str, object] = {"type": "object", "additionalProperties": True}


def call_list(tools: Sequence[ChatTool], places: Sequence[str], *, max_calls: int) -> GrammarSource:
    """One to `max_calls` calls of these tools. `places` name them in errors. Raises InvalidRequest for a schema that
    cannot be honoured."""
    definitions: dict[str, object] = {}
    calls: list[object] = []
    for index, (tool, place) in enumerate(zip(tools, places, strict=True)):
        definitions[f"t{index}"] = _moved(_arguments(tool, place), f"#/$defs/t{index}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [tool.name]}, "arguments": {"$ref": f"#/$defs/t{index}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    item = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": item, "minItems": 1, "maxItems": max_calls, "$defs": definitions}
    return GrammarSource(kind=GrammarKind.JSON_SCHEMA, source=orjson.dumps(schema).decode())


def _arguments(tool: ChatTool, place: str) -> object:
    param = f"{place}.function.parameters"
    given = _NONE if tool.parameters is None else {"type": "object", **tool.parameters}
    try:
        return narrowed(given, param)
    except InvalidRequest as error:
        raise InvalidRequest(f"tool '{tool.name}': {error.message}", param=param, code=error.code) from None


def _moved(schema: object, root: str) -> object:
    """The schema as a definition at `root`: its references start there."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):
        return {"$ref": root + schema["$ref"].removeprefix("#")}
    return {key: one if key in ("enum", "const") else _moved(one, root) for key, one in schema.items()}


# -- calls that the model chooses to make -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """How a model writes calls as text that a grammar can ask for."""

    trigger: str
    """What makes a call of a text."""
    begin: str
    end: str
    separator: str
    has_marks: bool
    """It needs the marks of the format; where those are special tokens no grammar can ask for them."""


_FORMS: Mapping[ToolFormat, _Form] = {
    ToolFormat.HERMES: _Form("<tool_call>", '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n", True),
    ToolFormat.LLAMA3: _Form('{"name": ', '{"name": "%s", "parameters": ', "}", "; ", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCalls:
    """Calls that the model may make or leave."""

    tools: Sequence[ChatTool]
    places: Sequence[str]
    is_strict: Sequence[bool]
    dialect: Dialect
    parallel: bool

    def in_text(self) -> GrammarSource | None:
        """If any tool is strict: free text in which whatever begins as a call goes on as one, its arguments by the
        schema of a strict tool. Raises InvalidRequest where calls are marked by special tokens."""
        if not any(self.is_strict):
            return None
        first = self.is_strict.index(True)
        form = self._form(
            f"tool '{self.tools[first].name}': 'strict' can be promised for this model only where calls are forced: "
            "use tool_choice 'required', or leave 'strict' out",
            f"{self.places[first]}.function.strict",
        )
        calls = {"tags": self._tags(form), "stop_after_first": not self.parallel}
        return _tag({"type": "triggered_tags", "triggers": [form.trigger], **calls})

    def or_answer(self, answer: GrammarSource) -> GrammarSource:
        """Calls and nothing else, or an answer that follows its own grammar."""
        form = self._form(
            "'tools': this model's calls cannot stand beside a format for the answer: leave one out, or use "
            "tool_choice 'none' or 'required'",
            "tools",
        )
        calls = {"tags": self._tags(form), "stop_after_first": not self.parallel}
        listed = {"type": "tags_with_separator", "separator": form.separator, "at_least_one": True, **calls}
        return _tag({"type": "or", "elements": [listed, _format(answer)]})

    def _form(self, refusal: str, param: str) -> _Form:
        form = _FORMS.get(self.dialect.format)
        if form is None or (form.has_marks and self.dialect.special_call_marks):
            raise InvalidRequest(refusal, param=param, code="unsupported_parameter")
        return form

    def _tags(self, form: _Form) -> list[object]:
        return [
            {
                "type": "tag",
                "begin": form.begin % tool.name,
                "content": {"type": "json_schema", "json_schema": _arguments(tool, place) if strict else _ANY},
                "end": form.end,
            }
            for tool, place, strict in zip(self.tools, self.places, self.is_strict, strict=True)
        ]


# -- behind reasoning -------------------------------------------------------------------------------------------------


def behind_reasoning(source: GrammarSource, *, is_open: bool) -> GrammarSource:
    """The block of reasoning, free text, and then the source. `is_open`: the prompt has opened the block, else the
    model may leave it out."""
    begin = "" if is_open else OPEN
    block = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": CLOSE}
    answer = _format(source)
    reasoned = {"type": "sequence", "elements": [block, {"type": "regex", "pattern": r"\n{0,2}"}, answer]}
    return _tag(reasoned if is_open else {"type": "or", "elements": [reasoned, answer]})


def _format(source: GrammarSource) -> Mapping[str, object]:
    """The source as a part of a structural tag."""
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": orjson.loads(source.source)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": source.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": source.source}
        case GrammarKind.CHOICE:
            texts = orjson.loads(source.source)
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        case GrammarKind.STRUCTURAL_TAG:
            tag: Mapping[str, Mapping[str, object]] = orjson.loads(source.source)
            return tag["format"]


def _tag(form: Mapping[str, object]) -> GrammarSource:
    tag = {"type": "structural_tag", "format": form}
    return GrammarSource(kind=GrammarKind.STRUCTURAL_TAG, source=orjson.dumps(tag).decode())
