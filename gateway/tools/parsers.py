"""Finds the calls of tools in a model's text, which comes in pieces of any size.

A parser takes text and writes pieces. It reads no further ahead than it must: text that cannot begin a call is content
at once, arguments are passed on as they are written. What was read as part of a call and is none (no JSON, no name, a
name that nobody offered) is content, as it stands, and the text behind it is looked at afresh. White space before a
call belongs to it.

    Hermes, Qwen:  <tool_call>{"name": "f", "arguments": {...}}</tool_call>, again and again
    Llama 3:       {"name": "f", "parameters": {...}}; {...}   at the start of the text, or behind <|python_tag|>
    Mistral:       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]   or   [TOOL_CALLS]f[ARGS]{...}, again and again
"""

import re

from gateway.tools.call_reader import CallReader
from gateway.tools.json_scan import JsonScanner, Status
from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter

_NAME = re.compile(r"[A-Za-z0-9_-]*")


class CallParser(TextReader):
    """What the formats share: a call that is a JSON object."""

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._reader = CallReader(writer)

    def _call(self) -> bool:
        self._at = self._reader.feed(self._buffer, self._at)
        if self._reader.status is Status.OPEN:
            return False
        self._state = self._after_call if self._reader.status is Status.DONE else self._text
        return True

    def _before_call(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        return self._begin_call() if self._buffer[self._at] == "{" else self._back_to_text()

    def _after_call(self) -> bool:
        raise NotImplementedError

    def _begin_call(self, *, only_known: bool = False) -> bool:
        self._reader = CallReader(self._writer, only_known=only_known)
        self._state = self._call
        return True


class MarkedParser(CallParser):
    """A mark stands before a call."""

    def _text(self) -> bool:
        if not self._find(self.marks[0], self._writer.content):
            return False
        self._state = self._before_call
        return True


class HermesParser(MarkedParser):
    """Several objects in one pair of marks are several calls."""

    marks = ("<tool_call>", "</tool_call>")

    def _after_call(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        if self._buffer[self._at] == "{":
            return self._begin_call()
        close = self.marks[1]
        is_next = self._is_next(close)
        if is_next is None:
            return False
        if is_next or (self._is_finished and close.startswith(self._buffer[self._at :])):
            self._take(len(close))
            self._writer.confirm()
            self._state = self._text
            return True
        return self._back_to_text()


class LlamaParser(MarkedParser):
    """Without a mark only the very start of a text may be a call: JSON further on is what the user asked for."""

    marks = ("<|python_tag|>",)

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._state = self._start

    def _start(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        if self._buffer[self._at] == "{":
            return self._begin_call(only_known=True)
        self._state = self._text
        return True

    def _after_call(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        if self._buffer[self._at] == ";":
            self._take(1)
            self._state = self._before_call
        else:
            self._state = self._text
        return True


class ListParser(CallParser):
    """A list of call objects that is the whole text: what a grammar of ours forces."""

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._state = self._start

    def _start(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        return self._begin_list() if self._buffer[self._at] == "[" else self._back_to_text()

    def _begin_list(self) -> bool:
        self._take(1)
        self._state = self._before_call
        return True

    def _after_call(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        character = self._buffer[self._at]
        if character == ",":
            self._take(1)
            self._state = self._before_call
            return True
        if character == "]":
            self._take(1)
            self._writer.confirm()
            self._state = self._text
            return True
        return self._back_to_text()


class MistralParser(ListParser):
    """The older form is a list; the newer one has a mark before each name, which may be followed by an id."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._state = self._text
        self._name = ""
        self._scanner = JsonScanner()

    def _text(self) -> bool:
        if not self._find(self.marks[0], self._writer.content):
            return False
        self._name = ""
        self._state = self._before_calls
        return True

    def _before_calls(self) -> bool:
        self._skip_spaces()
        if not self._has_more:
            return False
        if self._buffer[self._at] == "[":
            return self._begin_list()
        self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        found = _NAME.match(self._buffer, self._at)
        assert found is not None
        self._name += found[0]
        self._take(len(found[0]))
        if not self._has_more:
            return False
        self._state = self._before_arguments if self._name else self._back_to_text
        return True

    def _before_arguments(self) -> bool:
        """Between the name and the brace."""
        self._skip_spaces()
        if not self._has_more:
            return False
        if self._buffer[self._at] == "{":
            if not self._writer.begin(self._name):
                return self._back_to_text()
            self._scanner = JsonScanner()
            self._state = self._arguments
            return True
        for mark in self.marks[1:]:
            is_next = self._is_next(mark)
            if is_next is None:
                return False
            if is_next:
                self._take(len(mark))
                self._state = self._before_arguments if mark == self.marks[1] else self._call_id
                return True
        return self._back_to_text()

    def _call_id(self) -> bool:
        """The model's own id: the caller gets one that is unique."""
        found = _NAME.match(self._buffer, self._at)
        assert found is not None
        self._take(len(found[0]))
        if self._has_more:
            self._state = self._before_arguments
        return self._has_more

    def _arguments(self) -> bool:
        end = self._scanner.feed(self._buffer, self._at)
        self._writer.arguments(self._buffer[self._at : end])
        self._at = end
        if self._scanner.status is Status.OPEN:
            return False
        self._writer.end(is_complete=self._scanner.status is Status.DONE)
        self._state = self._text
        return True
