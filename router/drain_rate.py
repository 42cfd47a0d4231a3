"""How fast a queue is served, measured: what predictions of a wait and `Retry-After` are made of."""

from collections import deque

WINDOW_S = 10.0
MIN_SPAN_S, MIN_SERVED = 0.5, 4
"""A rate over less time, or of fewer requests, says nothing: the one before counts on."""


class DrainRate:
    """Work (weighted tokens) a second that was placed. Only while somebody waits is that what the cell can do."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, float]] = deque()
        self._waits_since: float | None = None
        self._known: float | None = None

    def waiting(self, is_waiting: bool, now: float) -> None:
        """Somebody waits now, or nobody any more."""
        if is_waiting and self._waits_since is None:
            self._waits_since = now
        elif not is_waiting and self._waits_since is not None:
            self._known, self._waits_since = self.per_s(now), None

    def note(self, work: float, now: float) -> None:
        """A request was placed."""
        self._served.append((now, work))
        self._forget(now)

    def per_s(self, now: float) -> float | None:
        """None while nothing is known."""
        self._forget(now)
        least = sum(work for _, work in self._served) / WINDOW_S
        if self._waits_since is not None:
            span_s = min(WINDOW_S, now - self._waits_since)
            served = [work for at, work in self._served if at > now - span_s]
            if span_s >= MIN_SPAN_S and len(served) >= MIN_SERVED:
                self._known = sum(served) / span_s
        return None if self._known is None else max(self._known, least)

    def _forget(self, now: float) -> None:
        while self._served and self._served[0][0] < now - WINDOW_S:
            self._served.popleft()
