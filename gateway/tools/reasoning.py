"""Splits the block in which a model reasons, `<think> ... </think>`, from the answer behind it.

    start --<think>--> opened --any text--> inside --</think>--> closed --any text--> answer
       '--any other text: there is no block--------------------------------------------^

A template may open the block in the prompt; then the text begins at `opened`. White space beside the marks belongs to
them.
"""

from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser(TextReader):
    """Stands before the parser of the answer, which sees what is behind the block."""

    marks = (OPEN, CLOSE)

    def __init__(self, writer: PieceWriter, then: TextReader, *, is_open: bool) -> None:
        super().__init__(writer)
        self._then = then
        self._state = self._opened if is_open else self._start
        self._num_fed = 0
        self.has_block = is_open
        self.end: int | None = None
        """Number of characters up to the end of the block, once it is closed."""

    def feed(self, text: str) -> None:
        self._num_fed += len(text)
        super().feed(text)

    def finish(self) -> None:
        self._is_finished = True
        while self._state():
            pass
        if self._state == self._answer:
            self._then.finish()
            return
        self._writer.reasoning(self._rest())
        self._writer.confirm()

    def _start(self) -> bool:
        self._skip_spaces()
        is_next = self._is_next(OPEN) if self._has_more or self._is_finished else None
        if is_next is None:
            return False
        if is_next:
            self.has_block = True
            self._take(len(OPEN))
            self._writer.confirm()
        self._state = self._opened if is_next else self._answer
        return True

    def _opened(self) -> bool:
        self._skip_spaces()
        self._writer.confirm()
        if self._has_more:
            self._state = self._inside
        return self._has_more

    def _inside(self) -> bool:
        if not self._find(CLOSE, self._writer.reasoning):
            return False
        self._writer.confirm()
        self.end = self._num_fed - len(self._buffer) + self._at
        self._state = self._closed
        return True

    def _closed(self) -> bool:
        self._skip_spaces()
        self._writer.confirm()
        if self._has_more:
            self._state = self._answer
        return self._has_more

    def _answer(self) -> bool:
        self._then.feed(self._rest())
        return False
