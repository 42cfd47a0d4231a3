"""JSON schemas for tests: random ones from a seed, and corner cases that others' users met."""

import random
from typing import Any

Schema = dict[str, Any]

KEYS = (
    "name",
    "age",
    "id",
    "tags",
    "price",
    "is_ok",
    "\u00fcn\u00efc\u00f6de",
    "\u6f22\u5b57",
    'quo"te',
    "a b",
    "\U0001f999",
)
WORDS = ("red", "green", "caf\u00e9", "line\nbreak", 'say "hi"', "back\\slash", "", "\u6f22\u5b57", "/")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][0-9]{3}$", "^(yes|no|maybe)$", "[0-9]", "^\\d{4}-\\d{2}$", "^[^x]{1,4}$")

CORNER_CASES: tuple[Schema | bool, ...] = (
    {},
    True,
    {"type": "object"},
    {"type": "array"},
    {"type": "array", "items": {}, "maxItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    {"required": ["a"]},
    {"minimum": 3},
    {"type": "integer", "minimum": 0},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "integer", "multipleOf": 7},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "array"], "minimum": 2, "maximum": 9, "maxItems": 1},
    {"const": None},
    {"const": {"k\u00fc": [1, "\u6f22", False]}},
    {"enum": [1, "1", None, 1.5, True, [], {"a": 1}]},
    {"type": "string", "enum": ["a", 5, "b"]},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "no-such-format"},
    {"type": "string", "pattern": "b"},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}],
        "additionalItems": False,
    },
    {"type": "object", "patternProperties": {"^a[a-z]{0,2}$": {"type": "integer"}}, "additionalProperties": {}},
    {"type": "object", "propertyNames": {"pattern": "^x[a-z]$"}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"a": True, "b": False}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "minProperties": 1},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
                "required": ["kind", "n"],
            },
            {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
        ]
    },
    {  # a list that refers to itself
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"child": {"$ref": "#"}, "leaf": {"type": "boolean"}}},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
)


def random_schemas(count: int, seed: int) -> list[Schema]:
    rng = random.Random(seed)
    return [_rooted(rng) for _ in range(count)]


def _rooted(rng: random.Random) -> Schema:
    """Mostly an object; some have definitions that refer to one another."""
    schema = _object(rng, 0) if rng.random() < 0.7 else _any(rng, 0)
    if rng.random() < 0.25 and "properties" in schema:
        schema["$defs"] = {"leaf": _any(rng, 2), "tree": _tree(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
        schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
    return schema


def _tree(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {
            "v": _any(rng, 3),
            "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": rng.randint(0, 2)},
        },
        "required": ["v"],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _string, _integer, _number, _enum, _const, _plain]
    if depth < 3:
        makers += [_object, _array, _union]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {key: _any(rng, depth + 1) for key in keys}}
    if rng.random() < 0.8:
        schema["required"] = rng.sample(keys, rng.randint(0, len(keys)))
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    if rng.random() < 0.3:
        schema["title"] = "something"
        schema["description"] = "that only describes"
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> Schema:
    return {"type": "integer", **_range(rng, lambda: rng.randint(-1000, 1000), 1)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", **_range(rng, lambda: round(rng.uniform(-50, 50), rng.randint(0, 3)), 0.5)}


def _range(rng: random.Random, draw: Any, least_width: float) -> Schema:
    low = draw()
    high = low + least_width + abs(draw())
    names = {"minimum": low, "maximum": high}
    if rng.random() < 0.3:
        names = {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    chosen = rng.sample(sorted(names), rng.randint(0, 2))
    return {name: names[name] for name in chosen}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([*WORDS, 0, -3, None, False, ["x", 1], {"deep": {"er": "\u6f22"}}])}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(("boolean", "null", "integer", "number"))}
