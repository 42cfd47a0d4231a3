"""What a decode worker tells the router of its pairs, for people: seldom, for they are many and decide nothing."""

from dataclasses import replace

from core.types import PairStatus
from kvtransfer.choice import PairReport
from kvtransfer.circuit import Circuit
from kvtransfer.pairs import PairCounts
from kvtransfer.transfer_thread import TransferThread
from worker.context import WorkerContext

EVERY_S = 2.0


class PairNews:
    """Asked at every heartbeat, on the event loop."""

    def __init__(self, context: WorkerContext, transfers: TransferThread) -> None:
        self._context = context
        self._transfers = transfers
        self._told_at: float | None = None

    def take(self) -> tuple[PairStatus, ...]:
        """Every pair to which a link was made or tried; empty until it is time again. A prefill worker has none: it
        takes nothing from anybody."""
        now = self._context.clock.now()
        if self._told_at is not None and now - self._told_at < EVERY_S:
            return ()
        counts, circuits = self._context.pairs.counts(), self._context.pairs.circuits()
        told = tuple(
            self._status(report, counts.get(peer, PairCounts()), circuits.get(peer))
            for peer, report in self._transfers.reports().items()
        )
        if told:
            self._told_at = now
        return told

    def _status(self, report: PairReport, counts: PairCounts, circuit: Circuit | None) -> PairStatus:
        link = report.chosen
        status = PairStatus(
            prefill=report.peer.worker_id,
            prefill_incarnation=report.peer.incarnation,
            decode=self._context.worker_id,
            circuit="" if circuit is None else str(circuit.state),
            why=report.reason if link is None else "" if circuit is None else circuit.why,
            num_bytes=counts.num_bytes,
            busy_s=counts.post_s + counts.move_s,
            num_handoffs=counts.num_handoffs,
            num_failures=sum(counts.failures.values()),
        )
        if link is None:
            return status
        return replace(
            status,
            backend=link.backend,
            mode=str(link.mode),
            lane=link.lane,
            bytes_per_s=link.bytes_per_s,
            memcpy_bytes_per_s=link.memcpy_bytes_per_s,
        )
