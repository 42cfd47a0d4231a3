"""The circuit of a pair: one that keeps failing is left alone for a while, and trusted again once its canary was read.

::

    CLOSED -- num_failures in a row --> OPEN -- open_s --> PROBING -- canary read --> CLOSED, on probation
                                         ^                    `-- not read --> OPEN, twice as long
    CLOSED, on probation -- a failure --> OPEN, twice as long        -- a good hand-off --> CLOSED
    OPEN | PROBING -- a hand-off that was under way is good --> CLOSED

OPEN ends by the clock, PROBING with its probe (which has ``transfer.handshake_s``). Failures count *in a row*: what was
begun before the last one was counted tells of the same incident and counts no more, so a stream that breaks under
twenty hand-offs is one failure. Sans-I/O, not thread-safe.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_OPEN_S = 60.0


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitSettings:
    num_failures: int = 3
    open_s: float = 2.0


class Circuit:
    def __init__(self, settings: CircuitSettings) -> None:
        self._settings = settings
        self._open_s = settings.open_s
        self._num_in_a_row = 0
        self._num_counted = 0
        self.state = CircuitState.CLOSED
        self.retry_at = 0.0
        """When an OPEN circuit is due for its probe, on the clock of the caller."""
        self.why = ""
        """The last failure."""
        self.num_openings = 0

    @property
    def is_closed(self) -> bool:
        """Hand-offs may begin."""
        return self.state is CircuitState.CLOSED

    def begin(self) -> int:
        """A hand-off begins. Returns what :meth:`fail` is to be told if it fails."""
        return self._num_counted

    def fail(self, begun: int, why: str, now: float) -> bool:
        """A hand-off has failed by the pair's fault. True if that opened the circuit."""
        if begun != self._num_counted or self.state is not CircuitState.CLOSED:
            return False
        self.why = why
        self._num_counted += 1
        self._num_in_a_row += 1
        if self._num_in_a_row < self._settings.num_failures:
            return False
        self._open(now)
        return True

    def succeed(self) -> None:
        """A hand-off was good: whatever was wrong with the pair is over."""
        self.state = CircuitState.CLOSED
        self._num_in_a_row = 0
        self._open_s = self._settings.open_s

    def begin_probe(self) -> None:
        """Its time has come. The caller reads the canary and tells :meth:`end_probe`."""
        assert self.state is CircuitState.OPEN
        self.state = CircuitState.PROBING

    def end_probe(self, error: str, now: float) -> None:
        """``error`` is empty when the canary was read."""
        if self.state is not CircuitState.PROBING:
            return
        self._open_s = min(2 * self._open_s, MAX_OPEN_S)
        if error:
            self.why = error
            self._open(now)
        else:
            self.state = CircuitState.CLOSED
            self._num_in_a_row = self._settings.num_failures - 1

    def _open(self, now: float) -> None:
        self.state = CircuitState.OPEN
        self.retry_at = now + self._open_s
        self.num_openings += 1
