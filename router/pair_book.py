"""What decode workers told of their pairs last: which link each takes, how fast it is, and whether it is left alone."""

from collections.abc import Collection, Iterable

from core.ids import Incarnation, WorkerId
from core.types import PairStatus, WorkerLoad, WorkerRegistration

Worker = tuple[WorkerId, Incarnation]


class PairBook:
    """By decode worker and its incarnation. Pairs whose prefill worker is gone are not shown."""

    def __init__(self) -> None:
        self._pairs: dict[Worker, tuple[PairStatus, ...]] = {}
        self._broken: dict[Worker, frozenset[Worker]] = {}

    def hear(self, decode: WorkerRegistration, load: WorkerLoad) -> list[tuple[WorkerId, bool]]:
        """Notes a heartbeat. Returns the prefill workers whose pairs are left alone from now on (true) or trusted
        again (false)."""
        key = (decode.worker_id, decode.incarnation)
        if load.pairs:
            self._pairs[key] = load.pairs
        before, now = self._broken.get(key, frozenset()), frozenset(load.broken_pairs)
        self._broken[key] = now
        return [*((worker_id, True) for worker_id, _ in now - before)] + [
            (worker_id, False) for worker_id, _ in before - now
        ]

    def keep_only(self, alive: Iterable[Worker]) -> None:
        kept = set(alive)
        self._pairs = {key: pairs for key, pairs in self._pairs.items() if key in kept}
        self._broken = {key: broken for key, broken in self._broken.items() if key in kept}

    def pairs(self, alive: Collection[Worker]) -> tuple[PairStatus, ...]:
        """By prefill and decode worker."""
        known = (pair for pairs in self._pairs.values() for pair in pairs)
        kept = [pair for pair in known if (pair.prefill, pair.prefill_incarnation) in alive]
        return tuple(sorted(kept, key=lambda pair: (pair.prefill, pair.decode)))
