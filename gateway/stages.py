"""Where a request's time went, seen from the gateway.

The clock is cut at gateway events, so the stages (`core.types.Stage`) partition the request's life and sum to it. What
a worker measured inside one interval may divide that interval; only the remainder, `network`, is a difference.

    admission | tokenize | admission | route_queue + route | prefill_queue + prefill + network | handoff_wait
    | transfer + network | decode_queue + decode + delivery + network | delivery

`retry` is the unfinished interval of an attempt that failed; `lost` the last one of a request that did.
"""

from collections.abc import Sequence
from itertools import accumulate

from core.clock import Clock
from core.types import Stage, StageInterval

MAX_INTERVALS = 96
"""Of one request. A request that is refused again and again has more: of its middle only the length is kept."""


class _Interval:
    __slots__ = ("attempt", "seconds", "stage")

    def __init__(self, stage: Stage, seconds: float, attempt: int) -> None:
        self.stage = stage
        self.seconds = seconds
        self.attempt = attempt


class StageClock:
    """Progress of one request's time, from when it is made or from ``started`` (of the same clock) on."""

    def __init__(self, clock: Clock, *, started: float | None = None) -> None:
        self._clock = clock
        self.started = self._last = clock.now() if started is None else started
        self.touched: float | None = None
        """When the last token came: the time until then was `decode`."""
        self._intervals: list[_Interval] = []
        self.attempt = 0
        """To which what is marked from now on belongs."""

    def copy(self) -> "StageClock":
        """Another clock with the same past."""
        other = StageClock(self._clock, started=self.started)
        other._last = self._last
        other._intervals = [_Interval(one.stage, one.seconds, one.attempt) for one in self._intervals]
        return other

    def elapsed_s(self) -> float:
        return self._clock.now() - self.started

    def touch(self) -> None:
        """A token has come now."""
        self.touched = self._clock.now()

    def mark(self, stage: Stage) -> None:
        """The time since the last mark (or token) was `stage`."""
        if self.touched is not None:
            self._add(Stage.DECODE, self.touched)
            self.touched = None
        self._add(stage, self._clock.now())

    def _add(self, stage: Stage, until: float) -> None:
        until = max(until, self._last)  # a token's time is that of its message, of which a part may be marked already
        seconds, self._last = until - self._last, until
        if not seconds:
            return
        intervals = self._intervals
        last = intervals[-1] if intervals else None
        if last is not None and last.stage is stage and last.attempt == self.attempt:
            last.seconds += seconds
            return
        intervals.append(_Interval(stage, seconds, self.attempt))
        if len(intervals) > MAX_INTERVALS:
            kept = intervals[MAX_INTERVALS // 2]
            kept.stage = Stage.RETRY
            kept.seconds += intervals.pop(MAX_INTERVALS // 2 + 1).seconds

    def divide(self, stage: Stage, parts: Sequence[tuple[Stage, float]], *, rest: Stage = Stage.NETWORK) -> None:
        """Divides the last interval of `stage` in this attempt by what a worker measured in it, in this order; the
        remainder, `rest`, follows.

        Parts that claim more than it lasted (clocks of two processes) are cut, first come first served.
        """
        for place in reversed(range(len(self._intervals))):
            whole = self._intervals[place]
            if whole.attempt != self.attempt:
                return
            if whole.stage is stage:
                break
        else:
            return
        left, made = whole.seconds, []
        for name, seconds in parts:
            part = min(max(seconds, 0.0), left)
            left -= part
            if part:
                made.append(_Interval(name, part, whole.attempt))
        if left or not made:
            made.append(_Interval(rest, left, whole.attempt))
        self._intervals[place : place + 1] = made

    def stages(self) -> tuple[tuple[str, float], ...]:
        """The sum of each, in the order of their begin."""
        sums: dict[str, float] = {}
        for one in self._intervals:
            sums[one.stage.value] = sums.get(one.stage.value, 0.0) + one.seconds
        return tuple(sums.items())

    def intervals(self) -> tuple[StageInterval, ...]:
        """One after the other, from 0 to `total_s`; whose worker is not known here."""
        starts = accumulate((one.seconds for one in self._intervals), initial=0.0)
        return tuple(
            StageInterval(stage=one.stage.value, start_s=start, duration_s=one.seconds, attempt=one.attempt)
            for start, one in zip(starts, self._intervals, strict=False)
        )

    def total_s(self) -> float:
        """From the start to the last mark: the sum of the stages."""
        return self._last - self.started
