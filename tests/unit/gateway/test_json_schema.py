"""Schemas are narrowed to what a grammar can hold to, or refused by the keyword's name: never ignored in silence."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from core.errors import InvalidRequest
from gateway.json_schema import MAX_DEPTH, MAX_ENUM, MAX_NODES, narrowed
from tests.support.random_schemas import CORNER_CASES, random_schemas

Schema = dict[str, Any]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ("text", "object or a boolean"),
        (None, "object or a boolean"),
        ([], "object or a boolean"),
        (False, "admits nothing"),
        ({"type": "strng"}, "'strng'"),
        ({"type": 5}, "'type'"),
        ({"type": []}, "'type'"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"type": "object", "properties": {"a": 5}}, "properties/a"),
        ({"type": "object", "required": "a"}, "'required'"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "'b'"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}}, "'patternProperties'"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "b"}}, "'propertyNames'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems'"),
        ({"type": "array", "minItems": -1}, "'minItems'"),
        ({"type": "array", "minItems": True}, "'minItems'"),
        ({"type": "array", "minItems": 1e40}, "'minItems'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern'"),
        ({"type": "string", "pattern": 5}, "'pattern'"),
        ({"type": "string", "minLength": 1.5}, "'minLength'"),
        ({"type": "number", "multipleOf": 0.1}, "'multipleOf'"),
        ({"type": "integer", "minimum": "0"}, "'minimum'"),
        ({"minimum": 3, "maxLength": 3}, "'type'"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"enum": []}, "'enum'"),
        ({"enum": "abc"}, "'enum'"),
        ({"enum": [1], "type": "string"}, "'enum'"),
        ({"enum": ["aa"], "maxLength": 1}, "'maxLength'"),
        ({"const": 1, "enum": [1]}, "'const'"),
        ({"anyOf": []}, "'anyOf'"),
        ({"anyOf": [{}], "maximum": 3}, "'maximum'"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "'allOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
        ({"oneOf": [{}, {"type": "number"}]}, "'oneOf'"),
        ({"$ref": "http://example.com/x"}, "'$ref'"),
        ({"$ref": "#/$defs/a", "maximum": 3}, "'maximum'"),
        ({"type": "object", "properties": {"a": {"$defs": {}}}}, "'$defs'"),
        ({"enum": list(range(MAX_ENUM + 1))}, "values"),
    ],
    ids=lambda value: json.dumps(value)[:70] if not isinstance(value, str) else value,
)
def test_what_a_grammar_cannot_hold_to_is_refused_by_name(schema: object, word: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        narrowed(schema, "response_format.json_schema.schema")
    assert word in refusal.value.message
    assert (refusal.value.param, refusal.value.code) == ("response_format.json_schema.schema", "invalid_json_schema")


def test_size_and_depth_are_bounded() -> None:
    deep: Schema = {"type": "integer"}
    for _ in range(MAX_DEPTH):
        deep = {"type": "array", "items": deep}
    narrowed(deep, "p")
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequest, match="deep"):
        narrowed(deep, "p")
    with pytest.raises(InvalidRequest, match="subschemas"):
        narrowed({"type": "object", "properties": {str(name): {} for name in range(MAX_NODES)}}, "p")


def test_order_and_descriptions() -> None:
    schema = {"title": "T", "properties": {"z": {"type": "null", "description": "d"}, "a": {"default": 1}}}
    narrow = narrowed(schema, "p")
    assert isinstance(narrow, dict)
    assert list(narrow["properties"]) == ["z", "a"]
    assert narrow["properties"] == {"z": {"type": "null"}, "a": {}}
    assert (narrow["type"], narrow["additionalProperties"]) == ("object", False)


VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        1.5,
        500,
        -0.5,
        "",
        "a",
        "b",
        "ab",
        "abc",
        "abcdef",
        "red",
        "yes",
        "0000-00",
    ),
    *([], [1], [1, True], [True], ["x", 1], [None, None, None]),
    *({}, {"a": 1}, {"a": None, "b": None}, {"a": 1, "c": "x"}, {"xa": True}, {"aa": 1}, {"kind": "b"}, {"name": "n"}),
    *({"name": "n", "age": 3}, {"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}),
)


@pytest.mark.parametrize("schema", [*CORNER_CASES, *random_schemas(60, seed=11)], ids=lambda one: json.dumps(one)[:60])
def test_what_the_narrowed_schema_admits_the_callers_admits(schema: Schema | bool) -> None:
    own, narrow = validator(schema), validator(narrowed(schema, "p"))
    for value in VALUES:
        assert own.is_valid(value) or not narrow.is_valid(value), value


def validator(schema: Any) -> Any:
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
