"""The gateway's heartbeat to the router: who we are, what ended, and (in answer) which models can be served now."""

import asyncio
import logging
from collections import deque
from dataclasses import replace
from itertools import islice

from core import types as t
from core.clock import Clock
from core.errors import ServingError
from core.ids import GatewayId, Incarnation
from gateway.ports import RouterPort

log = logging.getLogger(__name__)

MAX_RECORDS = 1000
MAX_SENT = 100
VIEW_AGE_LIMIT_S = 5.0


class Reporter:
    """Keeps the view of the cluster fresh. `run` is its one task."""

    def __init__(self, router: RouterPort, clock: Clock, gateway_id: GatewayId, incarnation: Incarnation) -> None:
        self._router = router
        self._clock = clock
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._records: deque[tuple[float, t.RequestRecord]] = deque(maxlen=MAX_RECORDS)
        """With the moment of their end."""
        self._view: t.ClusterView | None = None
        self._view_at = 0.0
        self._block_sizes: dict[str, int] = {}
        """Kept when a view lacks a model: a router that was started anew knows it only once a worker is back, and the
        next prompt is to be placed by its prefix all the same."""
        self.http_address = ""
        self.pid = 0
        self.num_requests = 0

    def add(self, record: t.RequestRecord) -> None:
        """Queues a finished request for the router's ring; the oldest are dropped when the router is long away."""
        self._records.append((self._clock.now(), record))

    async def run(self, interval_s: float) -> None:
        while True:
            await self.report()
            await asyncio.sleep(interval_s)

    async def report(self) -> None:
        """One heartbeat. A router that does not answer leaves the old view to age."""
        now = self._clock.now()
        records = tuple(replace(record, age_s=now - ended_at) for ended_at, record in islice(self._records, MAX_SENT))
        report = t.GatewayReport(
            gateway_id=self._gateway_id,
            incarnation=self._incarnation,
            http_address=self.http_address,
            pid=self.pid,
            num_requests=self.num_requests,
            records=records,
        )
        try:
            view = await self._router.report_gateway(report)
        except ServingError as error:
            log.debug("router did not take the report", extra={"slug": error.slug})
            return
        for _ in records:
            self._records.popleft()
        self._view, self._view_at = view, self._clock.now()
        self._block_sizes |= {model.name: model.block_size for model in view.models}

    def block_size(self, model: str) -> int:
        """Tokens of a KV block of the model's workers, as the router told last; 0 while it has not. For any thread."""
        return self._block_sizes.get(model, 0)

    def why_not_ready(self) -> str | None:
        """None when at least one model has a path of ready workers; else the reason, for people."""
        view = self._view
        if view is None:
            return "the router has not answered yet"
        age_s = self._clock.now() - self._view_at
        if age_s > VIEW_AGE_LIMIT_S:
            return f"the router has been silent for {age_s:.0f} s"
        if any(is_usable for _, is_usable, _ in view.usable):
            return None
        reasons = [f"{model}: {reason}" for model, _, reason in view.usable]
        return "; ".join(reasons) or "no worker has joined"
