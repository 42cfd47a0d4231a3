"""A caller's JSON schema, rewritten to what the grammar compiler honours exactly, or refused with the keyword's name.

The rewritten schema admits the same values or fewer, never more, so every finished answer is valid for the caller's.
What is narrowed: an object with `properties` and without `additionalProperties` is closed; keywords without `type`
imply their type; a one-sided range of numbers gets a far other side (endless digits are no answer); `format` gives way
to `pattern` and lengths (it is an annotation). Keywords that only describe are dropped.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from core.errors import InvalidRequest

MAX_DEPTH = 32
MAX_NODES = 4000
MAX_ENUM = 5000
MAX_COUNT = 10**9
"""Of items, properties or characters."""
FAR = 10**18
FAR_FLOAT = 10**12
"""The other side of a one-sided range."""

Node = dict[str, object]

_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_PROPERTIES = frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames"})
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": _PROPERTIES | {"minProperties", "maxProperties"},
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "additionalItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _RANGE,
    "integer": _RANGE,
    "boolean": frozenset(),
    "null": frozenset(),
}
_ASSERTIONS = frozenset().union(*_OF_TYPE.values()) | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_NOT_HONOURED: Mapping[str, tuple[object, ...]] = {
    "not": (),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True,),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that would be ignored in silence, and the values with which they ask for nothing."""


def narrowed(schema: object, param: str) -> object:
    """Raises InvalidRequest (`invalid_json_schema`) where the schema is malformed, too large or not supported."""
    return _Narrowing(param).root(schema)


class _Narrowing:
    def __init__(self, param: str) -> None:
        self._param = param
        self._num_nodes = 0
        self._num_enum = 0

    def root(self, schema: object) -> object:
        if not isinstance(schema, dict | bool):
            raise self._refuse("#", "a schema is an object or a boolean")
        if schema is False:
            raise self._refuse("#", "the schema 'false' admits nothing")
        narrow = self._node(schema, "#", 0)
        if isinstance(schema, dict):
            for name in ("$defs", "definitions"):
                given = schema.get(name)
                if given is not None:
                    narrow[name] = self._named(given, f"#/{name}", 0)
        return narrow

    # -- one schema ---------------------------------------------------------------------------------------------------

    def _node(self, schema: object, path: str, depth: int) -> Node:
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise self._refuse(path, f"a schema may be nested {MAX_DEPTH} deep")
        if self._num_nodes > MAX_NODES:
            raise self._refuse(path, f"a schema may have {MAX_NODES} subschemas")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._refuse(path, "a schema is an object or a boolean")
        for keyword, neutral in _NOT_HONOURED.items():
            if keyword in schema and schema[keyword] not in neutral:
                raise self._refuse(path, f"'{keyword}' is not supported")
        if depth and ("$defs" in schema or "definitions" in schema):
            raise self._refuse(path, "'$defs' is supported at the root only")
        node = {keyword: value for keyword, value in schema.items() if keyword in _ASSERTIONS}
        if schema.get("unevaluatedProperties") is False:
            node.setdefault("additionalProperties", False)
        if "$ref" in node:
            self._alone(node, "$ref", path)
            reference = node["$ref"]
            if not isinstance(reference, str) or not reference.startswith("#"):
                raise self._refuse(path, "'$ref' must point into the schema ('#/...')")
            return {"$ref": reference}
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in node:
                self._alone(node, keyword, path)
                return self._branches(node[keyword], keyword, path, depth)
        if "const" in node:
            if "enum" in node:
                raise self._refuse(path, "'const' beside 'enum' is not supported")
            node["enum"] = [node.pop("const")]
        if "enum" in node:
            return self._enum(node, path)
        return self._typed(node, path, depth)

    def _branches(self, branches: object, keyword: str, path: str, depth: int) -> Node:
        if not isinstance(branches, list) or not branches:
            raise self._refuse(path, f"'{keyword}' must be a list that is not empty")
        narrow = [self._node(branch, f"{path}/{keyword}/{index}", depth + 1) for index, branch in enumerate(branches)]
        if len(narrow) == 1:
            return narrow[0]
        if keyword == "allOf":
            raise self._refuse(path, "'allOf' with several members is not supported; write one schema")
        if keyword == "oneOf":
            for index, one in enumerate(narrow):
                if not all(_are_disjoint(one, other) for other in narrow[:index]):
                    raise self._refuse(path, "'oneOf' is supported where no value fits two members; use 'anyOf'")
        return {"anyOf": narrow}

    def _enum(self, node: Node, path: str) -> Node:
        values, types = node["enum"], _types(node.get("type"))
        if not isinstance(values, list) or not values:
            raise self._refuse(path, "'enum' must be a list that is not empty")
        self._num_enum += len(values)
        if self._num_enum > MAX_ENUM:
            raise self._refuse(path, f"a schema may list {MAX_ENUM} values")
        others = set(node) - {"enum", "type"}
        if others:
            raise self._refuse(path, f"'{min(others)}' beside 'enum' is not supported")
        kept = values if types is None else [value for value in values if any(_is_of(value, name) for name in types)]
        if not kept:
            raise self._refuse(path, "no value of 'enum' has the type")
        return {"enum": kept}

    def _typed(self, node: Node, path: str, depth: int) -> Node:
        types = _types(node.get("type"))
        if types is None:
            if "type" in node:
                raise self._refuse(path, "'type' must be a type's name or a list of them")
            types = self._implied(node, path)
            if not types:
                return {}
        for name in types:
            if name not in _OF_TYPE:
                raise self._refuse(path, f"'type' {name[:40]!r} does not exist")
        build: Mapping[str, Callable[[Node, str, int], Node]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        narrow: list[Node] = []
        for name in dict.fromkeys(types):
            own: Node = {key: value for key, value in node.items() if key in _OF_TYPE[name]}
            own["type"] = name
            narrow.append(build[name](own, path, depth) if name in build else own)
        return narrow[0] if len(narrow) == 1 else {"anyOf": narrow}

    def _implied(self, node: Node, path: str) -> list[str]:
        """The type that keywords without `type` speak of."""
        names = [name for name in ("object", "array", "string", "number") if set(node) & _OF_TYPE[name]]
        if len(names) > 1:
            raise self._refuse(path, "'type' is needed beside keywords of several types")
        return names

    # -- by type ------------------------------------------------------------------------------------------------------

    def _object(self, node: Node, path: str, depth: int) -> Node:
        narrow: Node = {"type": "object"}
        named = self._named(node.get("properties", {}), f"{path}/properties", depth)
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._refuse(path, "'required' must be a list of names")
        extra = node.get("additionalProperties", not named and "patternProperties" not in node)
        if not isinstance(extra, bool | dict):
            raise self._refuse(path, "'additionalProperties' must be a schema")
        forbidden = [name for name, one in self._object_of(node.get("properties", {}), path).items() if one is False]
        if forbidden:
            extra = False
            if set(forbidden) & set(required):
                raise self._refuse(path, f"the property {forbidden[0][:40]!r} is required and 'false'")
        patterns = node.get("patternProperties")
        missing = [name for name in required if name not in named]
        if patterns is not None:
            if named or missing:
                raise self._refuse(path, "'patternProperties' beside 'properties' or 'required' is not supported")
            narrow["patternProperties"] = self._named(patterns, f"{path}/patternProperties", depth)
            extra = False
        for name in missing:
            if node.get("additionalProperties") is False:
                raise self._refuse(path, f"the required property {name[:40]!r} is not among 'properties'")
            named[name] = self._node(extra or {}, f"{path}/additionalProperties", depth + 1)
        if "propertyNames" in node:
            if named or patterns is not None:
                raise self._refuse(path, "'propertyNames' beside 'properties' is not supported")
            narrow["propertyNames"] = self._node(node["propertyNames"], f"{path}/propertyNames", depth + 1)
        if named:
            narrow["properties"] = named
            narrow["required"] = list(dict.fromkeys(required))
        narrow["additionalProperties"] = (
            extra if isinstance(extra, bool) else self._node(extra, f"{path}/additionalProperties", depth + 1)
        )
        least, most = self._bounds(node, "minProperties", "maxProperties", path)
        if least is not None and least > max(1, len(_names(narrow))) and (extra or not named):
            # A repeated key counts once, and the grammar cannot tell.
            raise self._refuse(path, "'minProperties' above 1 needs 'properties' and no additional ones")
        narrow |= {
            key: value for key, value in (("minProperties", least), ("maxProperties", most)) if value is not None
        }
        return narrow

    def _array(self, node: Node, path: str, depth: int) -> Node:
        narrow: Node = {"type": "array"}
        items, first = node.get("items"), node.get("prefixItems")
        if isinstance(items, list):  # how drafts before 2020 say prefixItems
            first, items = items, node.get("additionalItems")
        if first is not None:
            if not isinstance(first, list):
                raise self._refuse(path, "'prefixItems' must be a list of schemas")
            narrow["prefixItems"] = [
                self._node(one, f"{path}/prefixItems/{index}", depth + 1) for index, one in enumerate(first)
            ]
        if items is not None:
            narrow["items"] = False if items is False else self._node(items, f"{path}/items", depth + 1)
        least, most = self._bounds(node, "minItems", "maxItems", path)
        return narrow | _given(minItems=least, maxItems=most)

    def _string(self, node: Node, path: str, depth: int) -> Node:
        least, most = self._bounds(node, "minLength", "maxLength", path)
        pattern, form = node.get("pattern"), node.get("format")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise self._refuse(path, "'pattern' must be a text")
            if least or most is not None:
                raise self._refuse(path, "'pattern' beside 'minLength' or 'maxLength' is not supported: use {m,n}")
            return {"type": "string", "pattern": pattern}
        if form is not None and not isinstance(form, str):
            raise self._refuse(path, "'format' must be a name")
        if form is not None and least is None and most is None:
            return {"type": "string", "format": form}
        return {"type": "string", **_given(minLength=least, maxLength=most)}

    def _number(self, node: Node, path: str, depth: int) -> Node:
        is_integer = node["type"] == "integer"
        for keyword in _RANGE & set(node):
            if isinstance(node[keyword], bool) or not isinstance(node[keyword], int | float):
                raise self._refuse(path, f"'{keyword}' must be a number")
        if "multipleOf" in node and not (is_integer and isinstance(node["multipleOf"], int) and len(node) == 2):
            raise self._refuse(path, "'multipleOf' is supported for integers, with an integer and no range")
        has_low = "minimum" in node or "exclusiveMinimum" in node
        has_high = "maximum" in node or "exclusiveMaximum" in node
        far = FAR if is_integer else FAR_FLOAT
        narrow = dict(node)
        if has_low and not has_high and _highest(node, ("minimum", "exclusiveMinimum")) < far:
            narrow["maximum"] = far
        if has_high and not has_low and _lowest(node, ("maximum", "exclusiveMaximum")) > -far:
            narrow["minimum"] = -far
        return narrow

    # -- small parts --------------------------------------------------------------------------------------------------

    def _named(self, given: object, path: str, depth: int) -> Node:
        kept = {name: schema for name, schema in self._object_of(given, path).items() if schema is not False}
        return {name: self._node(schema, f"{path}/{name[:40]}", depth + 1) for name, schema in kept.items()}

    def _object_of(self, given: object, path: str) -> Node:
        if not isinstance(given, dict):
            raise self._refuse(path, "must be an object of schemas")
        return given

    def _bounds(self, node: Node, low: str, high: str, path: str) -> tuple[int | None, int | None]:
        found: list[int | None] = []
        for keyword in (low, high):
            value = node.get(keyword)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if value is None:
                found.append(None)
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise self._refuse(path, f"'{keyword}' must be a whole number from 0 to {MAX_COUNT}")
            found.append(value)
        least, most = found
        if least is not None and most is not None and least > most:
            raise self._refuse(path, f"'{low}' is above '{high}'")
        return least, most

    def _alone(self, node: Node, keyword: str, path: str) -> None:
        others = set(node) - {keyword}
        if others:
            raise self._refuse(path, f"'{min(others)}' beside '{keyword}' is not supported")

    def _refuse(self, path: str, reason: str) -> InvalidRequest:
        place = re.sub(r"[^\x20-\x7e]", "?", path)[:200]
        return InvalidRequest(f"the schema at {place}: {reason}", param=self._param, code="invalid_json_schema")


def _given(**bounds: int | None) -> Node:
    return {keyword: bound for keyword, bound in bounds.items() if bound is not None}


def _types(given: object) -> list[str] | None:
    names = [given] if isinstance(given, str) else given
    return names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None


def _is_of(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    kinds: Mapping[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "number": (int, float),
        "null": (type(None),),
    }
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, kinds.get(name, ()))


def _highest(node: Node, keywords: Sequence[str]) -> float:
    return max(value for key in keywords if isinstance(value := node.get(key), int | float))


def _lowest(node: Node, keywords: Sequence[str]) -> float:
    return min(value for key in keywords if isinstance(value := node.get(key), int | float))


def _are_disjoint(one: Node, other: Node) -> bool:
    """Provably no value fits both: other types, other listed values, or a required property that tells them apart."""
    if "anyOf" in one:
        branches = one["anyOf"]
        return isinstance(branches, list) and all(_are_disjoint(branch, other) for branch in branches)
    if "anyOf" in other:
        return _are_disjoint(other, one)
    values, others = one.get("enum"), other.get("enum")
    if isinstance(values, list) and isinstance(others, list):
        return not any(value == another for value in values for another in others)
    if isinstance(others, list):
        return _are_disjoint(other, one)
    name = other.get("type")
    if isinstance(values, list):
        return isinstance(name, str) and not any(_is_of(value, name) for value in values)
    kinds = {one.get("type"), name}
    if None in kinds:
        return False
    if len(kinds) == 2:
        return kinds != {"integer", "number"}
    left, right = one.get("properties"), other.get("properties")
    if kinds != {"object"} or not isinstance(left, dict) or not isinstance(right, dict):
        return False
    required = set(_names(one)) & set(_names(other))
    return any(_are_disjoint(left[key], right[key]) for key in required if key in left and key in right)


def _names(node: Node) -> list[str]:
    required = node.get("required")
    return required if isinstance(required, list) else []
