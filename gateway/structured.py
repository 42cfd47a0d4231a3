"""`response_format`, `structured_outputs` and the older `guided_*` members: at most one of them, as one grammar source.

Everything that can be told without a compiler is refused here; a worker compiles the source before it answers, so what
only the compiler sees is a 400 before the status line too.
"""

from typing import TYPE_CHECKING

import orjson

from core.errors import InvalidRequest
from core.grammar import MAX_SOURCE_BYTES, GrammarKind, GrammarSource
from gateway.json_schema import MAX_DEPTH, narrowed

if TYPE_CHECKING:
    from gateway.schemas import GenerationBody, ResponseFormat, StructuredOutputs

MAX_CHOICES = 1000
ANY_OBJECT: object = {"type": "object"}
_GUIDED = ("json", "regex", "choice", "grammar")


def grammar_of(body: "GenerationBody") -> str:
    """The canonical source that a body asks for; empty when it asks for none. Raises InvalidRequest."""
    asked: list[tuple[str, GrammarSource]] = []
    if body.response_format is not None:
        source = _of_response_format(body.response_format)
        if source is not None:
            asked.append(("response_format", source))
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _of_structured_outputs(body.structured_outputs)))
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked.append((f"guided_{kind}", _of_kind(kind, value, f"guided_{kind}", free_whitespace=False)))
    if not asked:
        return ""
    if len(asked) > 1:
        names = ", ".join(f"'{name}'" for name, _ in asked)
        raise _refuse(asked[1][0], f"only one of {names} may be given")
    param, source = asked[0]
    if len(source.source.encode()) > MAX_SOURCE_BYTES:
        raise _refuse(param, f"'{param}' is too large: at most {MAX_SOURCE_BYTES} bytes")
    if body.ignore_eos:
        raise _refuse(
            "ignore_eos", f"'ignore_eos' cannot be used with '{param}': the grammar says where the answer ends"
        )
    return source.encode()


def grammar_member(body: "GenerationBody") -> str:
    """The member by which a body asks for a grammar; empty when it asks for none."""
    names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _GUIDED))
    return next((name for name in names if getattr(body, name) is not None), "")


def _of_response_format(given: "ResponseFormat") -> GrammarSource | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return _schema_source(ANY_OBJECT, "response_format", free_whitespace=False)
        case "json_schema":
            if given.json_schema is None:
                raise _refuse("response_format.json_schema", "'response_format.json_schema' is required")
            param = "response_format.json_schema.schema"
            return _schema_source(given.json_schema.schema_, param, free_whitespace=False)
        case "structural_tag":
            if given.format is None:
                raise _refuse("response_format.format", "'response_format.format' is required")
            tag = {"type": "structural_tag", "format": given.format}
            return _of_kind("structural_tag", tag, "response_format", free_whitespace=False)


def _of_structured_outputs(given: "StructuredOutputs") -> GrammarSource:
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    values = {"json": given.json_, **{name: getattr(given, name) for name in names[1:]}}
    present = [name for name in names if values[name] is not None and values[name] is not False]
    if len(present) != 1:
        raise _refuse("structured_outputs", f"'structured_outputs' needs exactly one of {', '.join(names)}")
    name = present[0]
    value = values[name]
    if name == "json_object":
        name, value = "json", ANY_OBJECT
    param = f"structured_outputs.{name}"
    return _of_kind(name, value, param, free_whitespace=given.disable_any_whitespace is False)


def _of_kind(kind: str, value: object, param: str, *, free_whitespace: bool) -> GrammarSource:
    match kind:
        case "json":
            return _schema_source(_parsed(value, param), param, free_whitespace=free_whitespace)
        case "choice":
            if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
                raise _refuse(param, f"'{param}' needs 1 to {MAX_CHOICES} texts")
            return GrammarSource(kind=GrammarKind.CHOICE, source=_dumps(list(dict.fromkeys(value))))
        case "structural_tag":
            tag = _parsed(value, param)
            if not isinstance(tag, dict) or "format" not in tag:
                raise _refuse(param, f"'{param}' must be an object with the member 'format'")
            return GrammarSource(kind=GrammarKind.STRUCTURAL_TAG, source=_dumps(_narrowed_tag(tag, param, 0)))
    text = str(value)
    if not text:
        raise _refuse(param, f"'{param}' must not be empty")
    return GrammarSource(kind=GrammarKind.REGEX if kind == "regex" else GrammarKind.EBNF, source=text)


def _schema_source(schema: object, param: str, *, free_whitespace: bool) -> GrammarSource:
    source = _dumps(narrowed(schema, param))
    return GrammarSource(kind=GrammarKind.JSON_SCHEMA, source=source, free_whitespace=free_whitespace)


def _narrowed_tag(value: object, param: str, depth: int) -> object:
    """The tag with every schema in it narrowed."""
    if depth > 2 * MAX_DEPTH:
        raise _refuse(param, f"'{param}' is too deeply nested")
    if isinstance(value, list):
        return [_narrowed_tag(one, param, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    is_schema = value.get("type") == "json_schema"
    return {
        name: narrowed(one, param) if is_schema and name == "json_schema" else _narrowed_tag(one, param, depth + 1)
        for name, one in value.items()
    }


def _parsed(value: object, param: str) -> object:
    """A schema may come as JSON or as the text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = orjson.loads(value)
    except orjson.JSONDecodeError:
        raise _refuse(param, f"'{param}' is not valid JSON") from None
    return parsed


def _dumps(value: object) -> str:
    return orjson.dumps(value).decode()


def _refuse(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
