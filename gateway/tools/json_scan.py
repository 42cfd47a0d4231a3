"""Finds the end of one JSON value in a text that comes in pieces, or the first character that JSON does not allow.

value -> string -> escape -> hex          after (a value in a container) -> value | key | done
      -> number | literal                 key -> string -> colon -> value
"""

import re
from collections.abc import Callable
from enum import Enum, auto

MAX_DEPTH = 64
SPACES = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class Status(Enum):
    OPEN = auto()
    DONE = auto()
    BAD = auto()


class JsonScanner:
    """One value, as strict as the standard. White space before it is not part of it."""

    def __init__(self) -> None:
        self.status = Status.OPEN
        self._state: Callable[[str, int], int] = self._value
        self._closers: list[str] = []
        self._is_key = False
        self._may_close = False
        self._piece = ""
        self._num_hex = 0

    def feed(self, text: str, at: int) -> int:
        """Reads on from `at`; the position behind what belongs to the value (`BAD`: of the character that does not)."""
        end = len(text)
        while at < end and self.status is Status.OPEN:
            at = self._state(text, at)
        return at

    # -- states: each takes the position of a character and returns the next one to look at ----------------------------

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character in "{[":
            if len(self._closers) >= MAX_DEPTH:
                return self._bad(at)
            self._closers.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_item
            return at + 1
        if character == '"':
            self._is_key = False
            self._state = self._string
            return at + 1
        if character == "-" or (character.isdecimal() and character.isascii()):
            self._piece = ""
            self._state = self._number
            return at
        if character in _LITERALS:
            self._piece = _LITERALS[character]
            self._state = self._literal
            return at
        return self._skip(text, at) if self._closers else self._bad(at)

    def _first_item(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(at)
        at = self._skip(text, at, allow_other=True)
        if at < len(text) and text[at] != "]":
            self._state = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return self._skip(text, at)
        self._is_key = True
        self._state = self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._skip(text, at)
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        character = text[at]
        if character == self._closers[-1]:
            return self._close(at)
        if character != ",":
            return self._skip(text, at)
        self._state = self._key if self._closers[-1] == "}" else self._value
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._end_value()
            return at + 1
        if text[at] == "\\":
            self._state = self._escape
            return at + 1
        return self._bad(at)

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._num_hex = 0
            self._state = self._hex
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._bad(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if not _HEX.match(text[at]):
            return self._bad(at)
        self._num_hex += 1
        if self._num_hex == 4:
            self._state = self._string
        return at + 1

    def _number(self, text: str, at: int) -> int:
        found = _NUMBER_PART.match(text, at)
        assert found is not None
        self._piece += found[0]
        if found.end() < len(text):
            if not _NUMBER.fullmatch(self._piece):
                return self._bad(found.end())
            self._end_value()
        return found.end()

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._piece[0]:
            return self._bad(at)
        self._piece = self._piece[1:]
        if not self._piece:
            self._end_value()
        return at + 1

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end_value(self) -> None:
        if self._closers:
            self._state = self._after
        else:
            self.status = Status.DONE

    def _close(self, at: int) -> int:
        self._closers.pop()
        self._end_value()
        return at + 1

    def _skip(self, text: str, at: int, *, allow_other: bool = False) -> int:
        """Over white space; anything else is an error here, unless the caller looks at it."""
        found = SPACES.match(text, at)
        assert found is not None
        if found.end() == at and not allow_other:
            return self._bad(at)
        return found.end()

    def _bad(self, at: int) -> int:
        self.status = Status.BAD
        return at
