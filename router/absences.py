"""Pools that should have workers and have no ready one, and for how long."""

from collections.abc import Iterable

from core.clock import Clock
from core.types import Role, WorkerState, WorkerStatus

Pool = tuple[str, Role]


class Absences:
    """A pool is absent when nobody in it was ready for ``after_s``: then it is not only starting anew."""

    def __init__(self, clock: Clock, *, after_s: float) -> None:
        self._clock = clock
        self._after_s = after_s
        self._since: dict[Pool, float] = {}

    def look(self, pools: Iterable[Pool], workers: Iterable[WorkerStatus]) -> frozenset[Pool]:
        """Those that are absent now. To be asked whenever something may have changed, and now and then."""
        now = self._clock.now()
        ready = {(w.registration.model.name, w.registration.role) for w in workers if w.state is WorkerState.READY}
        self._since = {pool: self._since.get(pool, now) for pool in pools if pool not in ready}
        return frozenset(pool for pool, since in self._since.items() if now - since >= self._after_s)
