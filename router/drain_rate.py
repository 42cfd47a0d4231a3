"""How fast a queue is served, measured: what predictions of a wait and `Retry-After` are made of."""

from collections import deque

WINDOW_S = 10.0
MIN_SPAN_S = 0.5
"""A rate over less time says nothing: the one before counts on."""


class DrainRate:
    """Work (weighted tokens) a second that was placed. Only while somebody waits is that what can be had."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, float]] = deque()
        self._waits_since: float | None = None
        self._known: float | None = None

    @property
    def is_waiting(self) -> bool:
        return self._waits_since is not None

    def is_over(self, now: float) -> bool:
        """Nobody waits, and nobody was served for so long that what was known is worth nothing."""
        self._forget(now)
        return self._waits_since is None and not self._served

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

    def per_s(self, now: float, next_work: float = 0.0) -> float | None:
        """None while nothing is known. ``next_work`` is counted as if it were served now: where little was, that is the
        most that can be hoped for."""
        self._forget(now)
        if self._waits_since is not None:
            begin = max(self._waits_since, now - WINDOW_S)
            served = [(at, work) for at, work in self._served if at > begin]
            if served and begin == self._waits_since:
                # Requests that began together end together: how long the first one took to end says nothing of the
                # next ones, so what counts begins with it.
                begin, _ = served.pop(0)
            work = sum(work for _, work in served) + next_work
            if now - begin >= MIN_SPAN_S and work > 0:
                self._known = work / (now - begin)
        return self._known

    def num_since_waiting(self, other: "DrainRate") -> int:
        """Requests that were placed here since somebody waits there."""
        since = other._waits_since
        return 0 if since is None else sum(at > since for at, _ in self._served)

    def _forget(self, now: float) -> None:
        while self._served and self._served[0][0] < now - WINDOW_S:
            self._served.popleft()
