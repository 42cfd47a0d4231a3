"""One call written as a JSON object: ``{"name": "f", "arguments": {...}}``, its members in any order.

    first_key -> key -> colon -> before_value -> value -> after_value -> (key | done)

Arguments are passed on as they are written, from the moment the name is known. They may also be a string that holds the
object, and may be absent or null. Members with other names say nothing to us and are left out.
"""

import json
import re
from collections.abc import Callable

from gateway.tools.json_scan import SPACES, JsonScanner, Status
from gateway.tools.writer import PieceWriter

ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")
KNOWN = ("name", *ARGUMENTS, "id", "type", "function")


class CallReader:
    """Reads from the brace that opens the object. `BAD` leaves the rest of the text to the caller."""

    def __init__(self, writer: PieceWriter, *, only_known: bool = False) -> None:
        self.status = Status.OPEN
        self._writer = writer
        self._only_known = only_known
        self._state: Callable[[str, int], int] = self._open
        self._scanner = JsonScanner()
        self._key = ""
        self._pieces: list[str] = []
        self._has_name = False
        self._has_arguments = False
        self._streams = False
        """The value that is read now is the arguments object."""
        self._told = ""
        """Arguments that came as a string before the name."""

    def feed(self, text: str, at: int) -> int:
        """Reads on from `at`; the position of the first character that was not taken."""
        end = len(text)
        while at < end and self.status is Status.OPEN:
            at = self._state(text, at)
        return at

    # -- states --------------------------------------------------------------------------------------------------------

    def _open(self, text: str, at: int) -> int:
        assert text[at] == "{", "a call begins with its brace"
        self._state = self._first_key
        return self._take(text, at, at + 1)

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._bad(at)  # a call without a name
        return self._before_key(text, at)

    def _before_key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return self._skip(text, at)
        self._scan(self._in_key)
        return at

    def _in_key(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._pieces.append(text[at:end])
        self._take(text, at, end)
        if self._scanner.status is Status.BAD:
            return self._bad(end)
        if self._scanner.status is Status.DONE:
            self._key = json.loads("".join(self._pieces))
            if self._only_known and self._key not in KNOWN:
                return self._bad(end)
            self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._skip(text, at)
        self._state = self._before_value
        return self._take(text, at, at + 1)

    def _before_value(self, text: str, at: int) -> int:
        end = self._spaces(text, at)
        if end == len(text):
            return end
        is_arguments = self._key in ARGUMENTS
        if (is_arguments and self._has_arguments) or (self._key == "name" and self._has_name):
            return self._bad(end)  # given twice: which one is meant?
        self._streams = is_arguments and text[end] == "{"
        self._scan(self._in_value)
        return end

    def _in_value(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._streams:
            self._writer.arguments(text[at:end])
        else:
            self._take(text, at, end)
            if self._key in ARGUMENTS or self._key == "name":
                self._pieces.append(text[at:end])
        if self._scanner.status is Status.BAD:
            return self._bad(end)
        if self._scanner.status is Status.DONE and not self._take_value():
            return self._bad(end)
        return end

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._state = self._before_key
            return self._take(text, at, at + 1)
        if text[at] != "}":
            return self._skip(text, at)
        if not self._has_name:
            return self._bad(at)
        self._take(text, at, at + 1)
        if not self._has_arguments:
            self._writer.arguments("{}")
        self._writer.end(is_complete=True)
        self.status = Status.DONE
        return at + 1

    # -- values --------------------------------------------------------------------------------------------------------

    def _take_value(self) -> bool:
        """A member is complete; false if it makes the call none."""
        self._state = self._after_value
        if self._streams:
            self._has_arguments = True
            return True
        if self._key == "name":
            name = json.loads("".join(self._pieces))
            self._has_name = isinstance(name, str) and self._writer.begin(name)
            if self._has_name:
                self._writer.arguments(self._told)
            return self._has_name
        if self._key in ARGUMENTS:
            return self._take_told_arguments(json.loads("".join(self._pieces)))
        return True

    def _take_told_arguments(self, value: object) -> bool:
        """Arguments that are not an object: null is none, a string may hold the object (but no half of a character)."""
        if value is None:
            return True
        if not isinstance(value, str) or _SURROGATE.search(value):
            return False
        scanner = JsonScanner()
        is_object = value.startswith("{") and scanner.feed(value, 0) == len(value) and scanner.status is Status.DONE
        if is_object:
            self._has_arguments = True
            if self._has_name:
                self._writer.arguments(value)
            else:
                self._told = value
        return is_object

    # -- small parts ---------------------------------------------------------------------------------------------------

    def _scan(self, state: Callable[[str, int], int]) -> None:
        self._scanner = JsonScanner()
        self._pieces.clear()
        self._state = state

    def _take(self, text: str, at: int, end: int) -> int:
        self._writer.maybe(text[at:end])
        return end

    def _spaces(self, text: str, at: int) -> int:
        found = SPACES.match(text, at)
        assert found is not None
        return self._take(text, at, found.end())

    def _skip(self, text: str, at: int) -> int:
        end = self._spaces(text, at)
        return self._bad(at) if end == at else end

    def _bad(self, at: int) -> int:
        self._writer.end(is_complete=False)
        self.status = Status.BAD
        return at
