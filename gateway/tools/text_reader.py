"""What every parser of an answer's text shares: a buffer of what is not understood yet, and the search for marks."""

from collections.abc import Callable

from gateway.tools.json_scan import SPACES
from gateway.tools.writer import PieceWriter

State = Callable[[], bool]
"""Reads on from the buffer. False: it needs more text first."""


class TextReader:
    """Reads text in pieces of any size and writes pieces. By itself it knows content only."""

    marks: tuple[str, ...] = ()
    """Texts that mean something; a tokenizer may have them as special tokens."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._buffer = ""
        self._at = 0
        self._is_finished = False
        self._state: State = self._text

    def feed(self, text: str) -> None:
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        while self._state():
            pass

    def finish(self) -> None:
        """The text is over: what was waited for does not come."""
        self._is_finished = True
        while self._state():
            pass
        self._writer.finish(self._rest())

    # -- states --------------------------------------------------------------------------------------------------------

    def _text(self) -> bool:
        """Content, up to a mark."""
        self._writer.content(self._rest())
        return False

    # -- small parts ---------------------------------------------------------------------------------------------------

    @property
    def _has_more(self) -> bool:
        return self._at < len(self._buffer)

    def _rest(self) -> str:
        """Takes all that is left of the buffer."""
        rest = self._buffer[self._at :]
        self._at = len(self._buffer)
        return rest

    def _find(self, mark: str, write: Callable[[str], None]) -> bool:
        """Writes the text up to `mark` and takes the mark, if it is there. What could become the mark waits, and so
        does the white space before it."""
        start = self._buffer.find(mark, self._at)
        end = start if start >= 0 else len(self._buffer) - self._num_begun(mark)
        piece = self._buffer[self._at : end]
        text = piece.rstrip(" \t\n\r")
        write(text)
        self._take(len(text), is_written=True)
        self._take(len(piece) - len(text))
        if start < 0:
            return False
        self._take(len(mark))
        return True

    def _num_begun(self, mark: str) -> int:
        """Length of the longest end of the buffer that begins `mark`."""
        start = self._buffer.find(mark[0], max(self._at, len(self._buffer) - len(mark) + 1))
        while start >= 0 and not mark.startswith(self._buffer[start:]):
            start = self._buffer.find(mark[0], start + 1)
        return len(self._buffer) - start if start >= 0 else 0

    def _is_next(self, mark: str) -> bool | None:
        """Whether the buffer goes on with `mark`; None while that is open."""
        if self._buffer.startswith(mark, self._at):
            return True
        is_begun = mark.startswith(self._buffer[self._at :])
        return None if is_begun and not self._is_finished else False

    def _take(self, size: int, *, is_written: bool = False) -> None:
        """Takes characters that are marks or beside one, if it comes to that."""
        if not is_written:
            self._writer.maybe(self._buffer[self._at : self._at + size])
        self._at += size

    def _skip_spaces(self) -> None:
        found = SPACES.match(self._buffer, self._at)
        assert found is not None
        self._take(found.end() - self._at)

    def _back_to_text(self) -> bool:
        """What was held is content; the text is looked at afresh from here."""
        self._writer.give_up()
        self._state = self._text
        return True
