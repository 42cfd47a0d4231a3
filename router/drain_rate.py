"""How fast a queue is served, measured: what predictions of a wait and `Retry-After` are made of."""

from collections import deque

WINDOW_S = 10.0
MIN_OTHERS = 4
"""So many must have been served while a tenant waits before it is said how slowly its own requests are."""
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
            self.per_s(now)
            self._waits_since = None

    def note(self, work: float, now: float) -> None:
        """A request was placed."""
        self._served.append((now, work))
        self._forget(now)

    def per_s(self, now: float) -> float | None:
        """None while nothing is known."""
        begin, work = self._since_first(now)
        if self._waits_since is not None and now - begin >= MIN_SPAN_S and work > 0:
            self._known = work / (now - begin)
        return self._known

    def share_per_s(self, now: float, whole: "DrainRate", next_work: float) -> float | None:
        """Of one tenant that waits, beside others who are served from the same queue, ``whole``; None while nothing is
        known. ``next_work`` is counted as if it were served now: where little was, that is the most that can be hoped
        for."""
        if self._waits_since is None:
            return None
        self._forget(now)
        begin = max(self._waits_since, whole._since_first(now)[0])
        if now - begin >= MIN_SPAN_S and whole.num_since_waiting(self) >= MIN_OTHERS:
            self._known = (sum(work for at, work in self._served if at > begin) + next_work) / (now - begin)
        return self._known

    def _since_first(self, now: float) -> tuple[float, float]:
        """From when on what is served says how fast, and what was served since.

        Requests that began together end together: how long the first one takes to end says nothing of the next ones, so
        where all the waiting is within the window, what counts begins with it."""
        self._forget(now)
        if self._waits_since is None:
            return now, 0.0
        begin = max(self._waits_since, now - WINDOW_S)
        served = [(at, work) for at, work in self._served if at > begin]
        if served and begin == self._waits_since:
            begin, _ = served.pop(0)
        return begin, sum(work for _, work in served)

    def num_since_waiting(self, other: "DrainRate") -> int:
        """Requests that were placed here since somebody waits there."""
        since = other._waits_since
        return 0 if since is None else sum(at > since for at, _ in self._served)

    def _forget(self, now: float) -> None:
        while self._served and self._served[0][0] < now - WINDOW_S:
            self._served.popleft()
