"""What is told to who watches the cluster: all of it as it is now, and what came to pass since the news before.

::

    begin --all that is remembered--> silent --something changed | interval_s--> told --the shortest pause--> silent
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from core.clock import Clock
from core.errors import InvalidRequest
from core.types import (
    ClusterNews,
    ClusterStatus,
    EventKind,
    GatewayReport,
    PlaceRequest,
    PoolSize,
    WorkerLoad,
    WorkerRegistration,
    WorkerStatus,
)
from router.admin import RecordRing
from router.chronicle import Chronicle
from router.history import History
from router.pair_book import PairBook
from router.registry import StateChange
from router.waiting import Refusal

MAX_RECORDS = 200
"""Finished requests in one message: more than a person can read. What is counted is in the samples."""
PAUSE_S = 0.1
"""Between two messages: a cluster that changes all the time is told ten times a second."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 60.0


class News:
    """Is told what happens, and tells it on. Everything is of one event loop."""

    def __init__(self, clock: Clock, records: RecordRing, status: Callable[[], ClusterStatus]) -> None:
        self._records = records
        self._status = status
        self._chronicle = Chronicle(clock)
        self._history = History(clock)
        self._pairs = PairBook()
        self._changed = asyncio.Event()

    # -- what happens -------------------------------------------------------------------------------------------------

    def change(self, changes: Sequence[StateChange]) -> None:
        """Workers are judged otherwise than before."""
        for change in changes:
            self._chronicle.note_change(change)
        if changes:
            self._wake()

    def hear(self, worker: WorkerRegistration, load: WorkerLoad) -> None:
        for prefill, is_broken in self._pairs.hear(worker, load):
            text = "left alone: its hand-offs failed in a row" if is_broken else "trusted again"
            self._note(EventKind.QUARANTINE, f"{prefill} > {worker.worker_id}", text)

    def scale(self, before: Sequence[PoolSize], sizes: Sequence[PoolSize], by: str) -> None:
        old = {(pool.model, pool.role): pool.replicas for pool in before}
        changes = [
            f"{pool.role} {old.get((pool.model, pool.role), 0)} to {pool.replicas}"
            for pool in sizes
            if old.get((pool.model, pool.role)) != pool.replicas
        ]
        if changes:
            models = dict.fromkeys(pool.model for pool in sizes if old.get((pool.model, pool.role)) != pool.replicas)
            self._note(EventKind.SCALE, ", ".join(models), f"{', '.join(changes)}, {by}")

    def send_away(self, worker_id: str, reason: str, *, is_flip: bool = False) -> None:
        """A worker was told to drain, or to drain and then to take the other role."""
        text = "drains, then serves in the other role" if is_flip else "drains"
        self._note(EventKind.FLIP if is_flip else EventKind.DRAIN, worker_id, f"{text}: {reason}")

    def shed(self, request: PlaceRequest, refusal: Refusal) -> None:
        self._note(EventKind.SHED, request.model, f"refused: {refusal.replace('_', ' ')}")

    def gateway(self, gateway_id: str, *, is_lost: bool) -> None:
        kind = EventKind.DEATH if is_lost else EventKind.JOINED
        self._note(kind, gateway_id, "is lost: silent for too long" if is_lost else "reports")

    def end(self, report: GatewayReport) -> None:
        """Requests have ended."""
        if report.records:
            self._history.end(report.records)
            self._wake()

    def tick(self, workers: Sequence[WorkerStatus], num_waiting: int) -> None:
        """Time has passed."""
        self._pairs.keep_only((w.registration.worker_id, w.registration.incarnation) for w in workers)
        if self._history.tick(workers, num_waiting):
            self._wake()

    def _note(self, kind: EventKind, subject: str, text: str) -> None:
        self._chronicle.note(kind, subject, text)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- what is told -------------------------------------------------------------------------------------------------

    async def watch(self, interval_s: float) -> AsyncGenerator[ClusterNews, None]:
        """The news until the watcher has enough, never further apart than ``interval_s``. Raises InvalidRequest."""
        if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
            raise InvalidRequest(f"interval_s is {interval_s:g}: give {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
        seen = (0, 0, 0)
        while True:
            changed = self._changed
            news, seen = self._news(*seen)
            yield news
            await asyncio.sleep(PAUSE_S)  # a bound on how often, whatever happens
            try:
                async with asyncio.timeout(interval_s - PAUSE_S):
                    await changed.wait()
            except TimeoutError:
                pass

    def _news(self, version: int, num_records: int, num_samples: int) -> tuple[ClusterNews, tuple[int, int, int]]:
        """The arguments say how far they were told."""
        status = self._status()
        alive = {(w.registration.worker_id, w.registration.incarnation) for w in status.workers}
        news = ClusterNews(
            status=status,
            pairs=self._pairs.pairs(alive),
            events=self._chronicle.since(version),
            records=self._records.since(num_records, MAX_RECORDS),
            samples=self._history.since(num_samples),
        )
        return news, (self._chronicle.version, self._records.num_pushed, self._history.num_samples)
