"""One fetch as the transfer loop keeps it: its session, its link, its operations, and what it has cost."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtransfer.backends.base import Link, Op
from kvtransfer.copies import Copies
from kvtransfer.fetch import FetchPart, FetchResult, FetchTimes, Transfer, pinned_future
from kvtransfer.plan import Plan
from kvtransfer.session import Session


@dataclass(slots=True, eq=False)
class Part:
    """Chunks that were asked for together."""

    num_left: int
    """That have not arrived."""
    num_bytes: int = 0
    num_descriptors: int = 0
    begun_at: float | None = None
    """When the first of them was posted."""
    arrived_at: float | None = None
    is_early: bool = False
    """Begun before all that there is to read was known."""
    arrived: "Future[bool]" = field(default_factory=pinned_future)
    """True once all of them have, False when the fetch ended before."""


@dataclass(slots=True, eq=False)
class Work:
    session: Session
    link: Link
    slot: int
    transfer: Transfer
    chunks: list[Copies] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """Of each chunk, the part that it belongs to."""
    added: list[Part] = field(default_factory=list)
    """In the order in which they were asked for."""
    to_post: deque[int] = field(default_factory=deque)
    """Keys whose turn has not come."""
    ops: dict[int, Op] = field(default_factory=dict)
    cell: int | None = None
    post_s: float = 0.0
    num_bytes: int = 0
    granted_at: float | None = None
    """When all that there is to read was known; None for a fetch that began with it."""
    early_bytes: int = 0
    """That had arrived by then."""
    early_post_s: float = 0.0

    def extend(self, plan: Plan) -> Part:
        part = Part(num_left=len(plan.chunks), num_bytes=plan.num_bytes, num_descriptors=plan.num_copies)
        self.chunks += plan.chunks
        self.parts += [part] * len(plan.chunks)
        return part

    def result(self, now: float) -> FetchResult:
        """Once the session has an outcome."""
        session = self.session
        assert session.outcome is not None
        return FetchResult(
            transfer_id=self.transfer.transfer_id,
            outcome=session.outcome,
            detail=session.detail,
            backend=self.link.peer.link.backend,
            mode=self.link.peer.link.mode,
            num_bytes=self.num_bytes,
            early_bytes=self.early_bytes,
            num_copies=sum(map(len, self.chunks)),
            snapshot=session.snapshot,
            is_data_complete=session.is_data_complete,
            times=self._times(now),
            parts=tuple(
                FetchPart(
                    begun_s=0.0 if part.begun_at is None else now - part.begun_at,
                    arrived_s=None if part.arrived_at is None else now - part.arrived_at,
                    num_bytes=part.num_bytes,
                    num_descriptors=part.num_descriptors,
                    is_early=part.is_early,
                )
                for part in self.added
            ),
        )

    def _times(self, now: float) -> FetchTimes:
        session = self.session
        started = session.started_at if session.started_at is not None else now
        arrived = session.arrived_at if session.arrived_at is not None else now
        granted = self.granted_at if self.granted_at is not None else session.queued_at
        late_post_s = self.post_s - self.early_post_s
        return FetchTimes(
            queue_s=started - session.queued_at,
            post_s=self.post_s,
            wire_s=arrived - started,
            slot_s=now - arrived,
            total_s=now - session.queued_at,
            late_post_s=late_post_s,
            late_move_s=max(0.0, arrived - max(started, granted) - late_post_s),
        )
