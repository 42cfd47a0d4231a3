"""Finds calls whose arguments are no JSON but marked one by one, as Qwen3-Coder writes them.

    <tool_call> <function=f> <parameter=city> Rome </parameter> ... </function> </tool_call>

The arguments are written anew as the JSON object that they mean: by the tool's schema a text, or else any JSON. A text
is passed on while it is written, without the line breaks beside its marks.
"""

import json
import re
from collections.abc import Mapping

import orjson

from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]{0,256}")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class XmlParser(TextReader):
    """text -> before_function -> name -> in_function (-> key -> value)* -> after_function -> text"""

    marks = (OPEN, CLOSE)

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._types: Mapping[str, object] = {}
        self._keys: set[str] = set()
        self._is_text = False
        self._piece = ""

    def finish(self) -> None:
        if self._state == self._value and not self._is_text:
            self._writer.arguments(self._piece)
        super().finish()

    # -- states -------------------------------------------------------------------------------------------------------

    def _text(self) -> bool:
        if not self._find(OPEN, self._writer.content):
            return False
        self._state = self._before_function
        return True

    def _before_function(self) -> bool:
        self._skip_spaces()
        is_next = self._is_next(FUNCTION) if self._has_more else None
        if is_next is None:
            return False
        if not is_next:
            return self._back_to_text()
        self._take(len(FUNCTION))
        self._state = self._name
        return True

    def _name(self) -> bool:
        name = self._marked()
        if name is None:
            return False
        if not name or not self._writer.begin(name):
            return self._back_to_text()
        self._types = _types_of(self._writer.tools[name])
        self._keys = set()
        self._writer.arguments("{")
        self._state = self._in_function
        return True

    def _in_function(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        is_parameter, is_end = self._is_next(PARAMETER), self._is_next(FUNCTION_END)
        if is_parameter:
            self._take(len(PARAMETER))
            self._state = self._key
        elif is_end:
            self._take(len(FUNCTION_END))
            self._writer.arguments("}")
            self._writer.end(is_complete=True)
            self._state = self._after_function
        elif is_parameter is None or is_end is None:
            return False
        else:
            return self._broken()
        return True

    def _key(self) -> bool:
        key = self._marked()
        if key is None:
            return False
        if not key or key in self._keys:
            return self._broken()
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._is_text = self._types.get(key, "string") == "string"
        self._writer.arguments(f"{comma}{_dumps(key)}: " + ('"' if self._is_text else ""))
        self._piece = ""
        self._state = self._before_value
        return True

    def _before_value(self) -> bool:
        """The line break behind the mark is not part of the value."""
        if not self._has_more:
            return False
        self._take(self._buffer[self._at] == "\n")
        self._state = self._value
        return True

    def _value(self) -> bool:
        end = self._buffer.find(PARAMETER_END, self._at)
        stop = end if end >= 0 else len(self._buffer) - self._num_begun(PARAMETER_END)
        # The line break before the mark is not part of the value; whether one is there is seen later.
        if stop > self._at and self._buffer[stop - 1] == "\n":
            stop -= 1
        if stop > self._at:
            self._add(self._buffer[self._at : stop])
            self._take(stop - self._at)
        if end < 0:
            return False
        self._take(end - self._at + len(PARAMETER_END))
        self._writer.arguments('"' if self._is_text else _json_of(self._piece))
        self._state = self._in_function
        return True

    def _after_function(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        is_function, is_close = self._is_next(FUNCTION), self._is_next(CLOSE)
        if is_function:
            self._state = self._before_function
            return True
        if is_close or (self._is_finished and CLOSE.startswith(self._buffer[self._at :])):
            self._take(len(CLOSE))
            self._writer.confirm()
            self._state = self._text
            return True
        return False if is_function is None or is_close is None else self._back_to_text()

    # -- small parts --------------------------------------------------------------------------------------------------

    def _marked(self) -> str | None:
        """The name inside a mark, up to its bracket; empty where there is none, None while it is not complete."""
        found = _NAME.match(self._buffer, self._at)
        assert found is not None
        if found.end() == len(self._buffer) and len(found[0]) < 256:
            return None
        if not self._buffer.startswith(">", found.end()):
            return ""
        self._take(len(found[0]) + 1)
        return found[0]

    def _add(self, text: str) -> None:
        if self._is_text:
            self._writer.arguments(_dumps(text)[1:-1])
        else:
            self._piece += text

    def _broken(self) -> bool:
        self._writer.end(is_complete=False)
        self._state = self._text
        return True


def _types_of(schema: object) -> Mapping[str, object]:
    """The types of the arguments that a schema tells; anything else is taken for a text."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    told = {name: one["type"] for name, one in properties.items() if isinstance(one, dict) and "type" in one}
    return {name: kind if isinstance(kind, str) else "any" for name, kind in told.items()}


def _json_of(text: str) -> str:
    """A value that is no text, as JSON; as a text if it is none."""
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    try:
        orjson.loads(stripped)
    except orjson.JSONDecodeError:
        return _dumps(text)
    return stripped


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
