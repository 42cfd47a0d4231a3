"""Where a request's time went, seen from the gateway.

The clock is cut at gateway events, so the stages partition the request's life and sum to it. What a worker measured
inside one interval may divide that interval; only the remainder, `network`, is a difference.

    prepare | place | queue + prefill + network | admit | transfer_* + network | decode

`transfer_*` are wait, post, move, verify and publish: the hand-off as D saw it, from the grant on. `retry` is the
unfinished interval of an attempt that failed; `lost` the last one of a request that did.
"""

from collections.abc import Sequence

from core.clock import Clock


class StageClock:
    """Progress of one request's time. Starts when made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = self._last = clock.now()
        self.touched: float | None = None
        """When the last token came: the time until then was `decode`."""
        self._stages: dict[str, float] = {}

    def copy(self) -> "StageClock":
        """Another clock with the same past."""
        other = StageClock(self._clock)
        other._started, other._last, other._stages = self._started, self._last, dict(self._stages)
        return other

    def elapsed_s(self) -> float:
        return self._clock.now() - self._started

    def touch(self) -> None:
        """A token has come now."""
        self.touched = self._clock.now()

    def mark(self, stage: str) -> None:
        """The time since the last mark (or token) was `stage`."""
        if self.touched is not None:
            self._add("decode", self.touched)
            self.touched = None
        self._add(stage, self._clock.now())

    def _add(self, stage: str, until: float) -> None:
        until = max(until, self._last)  # a token's time is that of its message, of which a part may be marked already
        self._stages[stage] = self._stages.get(stage, 0.0) + until - self._last
        self._last = until

    def divide(self, stage: str, parts: Sequence[tuple[str, float]], *, rest: str = "network") -> None:
        """Divides a marked stage by what a worker measured in it; the remainder is `rest`.

        Parts that claim more than the stage lasted (clocks of two processes) are cut, first come first served.
        """
        if stage not in self._stages:
            return
        left = self._stages.pop(stage)
        for name, seconds in parts:
            part = min(max(seconds, 0.0), left)
            left -= part
            self._stages[name] = self._stages.get(name, 0.0) + part
        self._stages[rest] = self._stages.get(rest, 0.0) + left

    def stages(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._stages.items())

    def total_s(self) -> float:
        """From the start to the last mark: the sum of the stages."""
        return self._last - self._started
