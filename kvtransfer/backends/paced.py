"""A backend whose reads of KV take as long as somebody says: for workers whose KV is smaller than what it stands for.

The bytes are moved by the backend within; an operation is seen as DONE when its time is over, too. Operations of one
worker take turns, as they do on one network card. Slots, canaries and handshakes are not slowed down.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from core.handoff import LinkInfo, PeerInfo
from kvtransfer.backends.base import PENDING, Backend, Batch, Identity, Link, Op, OpState, OpStatus
from kvtransfer.layout import Region
from kvtransfer.memory import REGION_KV

ReadCost = Callable[[int], float]
"""Seconds that a read of so many bytes takes."""


class PacedBackend:
    """Contract: :mod:`kvtransfer.backends.base`."""

    def __init__(self, inner: Backend, cost_s: ReadCost, *, now: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._cost_s = cost_s
        self._now = now
        self._busy_until = 0.0
        self._times: dict[Op, tuple[float, float]] = {}
        """When an operation that is not terminal yet was posted, and when it is due."""

    @property
    def name(self) -> str:
        return self._inner.name

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        return self._inner.open(identity, regions)

    def connect(self, peer: PeerInfo) -> Link:
        return self._inner.connect(peer)

    def post(self, link: Link, batch: Batch) -> Op:
        posted_at = self._now()
        op = self._inner.post(link, batch)
        if batch.local_region == REGION_KV:
            self._busy_until = max(self._busy_until, posted_at) + self._cost_s(batch.num_bytes)
            self._times[op] = posted_at, self._busy_until
        return op

    def poll(self, op: Op) -> OpStatus:
        status = self._inner.poll(op)
        if status.state is OpState.PENDING or op not in self._times:
            return status
        posted_at, due = self._times[op]
        if status.state is OpState.DONE and self._now() < due:
            return PENDING
        if op.stats is not None:
            op.stats = replace(op.stats, move_s=max(op.stats.move_s, self._now() - posted_at - op.stats.post_s))
        del self._times[op]
        return status

    def abort(self, link: Link) -> bool:
        return self._inner.abort(link)

    def socket_bytes(self, link: Link) -> int:
        return self._inner.socket_bytes(link)

    def lane(self, link: Link) -> str:
        return self._inner.lane(link)

    def explain(self, link: Link) -> str:
        return self._inner.explain(link)

    def disconnect(self, link: Link) -> None:
        self._inner.disconnect(link)

    def close(self) -> bool:
        return self._inner.close()
