"""The short way of a plain token: from a worker's token stream to the client's connection in one call.

Most tokens of a stream are nothing but tokens, their text is whole characters, and the client has read what came
before. All that such a token needs are prepared bytes: how a chunk begins, its text as JSON, how it ends. Every other
token goes the long way (`legs`, `attempt`, `text`, `answers`, `event_stream`), which would write the same bytes.

A lane belongs to one choice. It is open while both of its ends are::

    text end     `texts` is the vocabulary: no character is begun, no end was found    (opened and closed by `attempt`)
    client end   `write` is the connection's: nothing waits, the client reads          (by `event_stream`)

So few objects are touched for a token because between two steps others have used the processor's caches: what a token
costs is mostly what it has to fetch.
"""

from collections.abc import Callable, Sequence

from gateway.http import Writer
from gateway.stages import StageClock

Slow = Callable[[int, int, float], None]
"""The long way: index, token id, and when it came."""
CLOSED: tuple[bytes | None, ...] = ()


class Lane:
    """`take` is a token's way. Made closed, at both ends."""

    __slots__ = (
        "_begins",
        "_end",
        "_size",
        "_stages",
        "_vocabulary",
        "accepted",
        "head",
        "slow",
        "tail",
        "texts",
        "write",
    )

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        """``vocabulary``: by token id, the text as it stands between the quotes of a JSON string, or None."""
        self._vocabulary = vocabulary
        self.texts: Sequence[bytes | None] = CLOSED
        self.write: Callable[[bytes], None] | None = None
        self.head = self.tail = b""
        """What stands before and behind the text; set when the choice's first chunk is made."""
        self.accepted: list[int] = []
        self.slow: Slow
        self._stages: StageClock
        self._begins: Sequence[bytes] = ()
        self._end = b""
        self._size = 0

    def join(self, accepted: list[int], stages: StageClock) -> None:
        """``accepted`` are the choice's tokens, which are added to here."""
        self.accepted, self._stages = accepted, stages

    def take(self, index: int, token_id: int, now: float) -> None:
        write = self.write
        if write is not None and index == len(self.accepted):
            try:
                text = self.texts[token_id]
                if text is not None:
                    write(b"".join((self._begins[self._size + len(text)], self.head, text, self._end)))
                    self.accepted.append(token_id)
                    self._stages.touched = now
                    return
            except IndexError:  # closed, or no token of ours, or a very long one
                pass
            except RuntimeError:  # the connection is being closed
                self.write = None
        self.slow(index, token_id, now)

    def open_text(self) -> None:
        self.texts = self._vocabulary

    def close_text(self) -> None:
        self.texts = CLOSED

    def open_client(self, writer: Writer) -> None:
        """Has no effect before the first chunk of the choice."""
        if self.head:
            self._begins, self._end = writer.begins, self.tail + writer.end
            self._size = len(self.head) + len(self.tail)
            self.write = writer.raw

    def close_client(self) -> None:
        self.write = None
