"""What a link is worth, found out before it is used: reads its peer's slots and its canary.

::

    SLOTS (a few, for the latency) -> CANARY (the whole of it, checked) -> RATE (again, for the bandwidth) -> done
      any -- operation failed | wrong bytes | bytes came by sockets | deadline --> done, with an error
    done -- last operation terminal --> quiet: the landing cell is free again

Driven by ``turn``; time is counted in operations and cut off at ``_RATE_S``, so that a handshake takes milliseconds. A
thorough one takes longer, and lets others have the thread between its reads.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from core.clock import Clock
from core.errors import BackendFailed, DigestMismatch, ServingError, StaleLease
from core.handoff import HandoffOutcome, TransferMode
from kvtransfer.backends.base import Backend, Batch, Link, Op, OpState
from kvtransfer.canary import hash_canary
from kvtransfer.fetch import error_of
from kvtransfer.layout import region_of
from kvtransfer.memory import CELL_BYTES, REGION_CANARY, REGION_LANDING, REGION_SLOTS, Scratch
from kvtransfer.plan import Copy
from kvtransfer.slot import parse_slot

_LATENCY_READS = 3
_RATE_READS, _THOROUGH_READS = 4, 100
_RATE_S, _THOROUGH_S = 0.005, 0.5
NUM_GLANCES = 30
"""An operation is looked at so often at once, to measure it better than the loop's sleeps would; then by ``turn``."""
_GLANCE_S = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One link as measured. Rates are of the canary; 0 where it did not get so far."""

    backend: str
    mode: TransferMode
    connect_s: float
    """Seconds that the connect held its thread."""
    latency_s: float = 0.0
    """The fastest read of 64 bytes."""
    bytes_per_s: float = 0.0
    """Of the fastest read of the whole canary."""
    memcpy_bytes_per_s: float = 0.0
    """Copying the same bytes within this process, at the same time."""
    lane: str = ""
    """What carries the bytes, as far as it can be seen. For people."""
    is_emulated: bool = False
    """Declared one-sided, but the bytes came through sockets of this process."""
    error: ServingError | None = None

    @property
    def is_usable(self) -> bool:
        return self.error is None


class Probe:
    """The measurement of one link. Used by the transfer thread only."""

    def __init__(
        self,
        backend: Backend,
        link: Link,
        landing: Scratch,
        cell: int,
        *,
        connect_s: float,
        clock: Clock,
        num_glances: int,
        is_thorough: bool = False,
    ) -> None:
        """``cell`` is the probe's own until ``is_quiet``."""
        self.link = link
        self.cell = cell
        self._clock = clock
        self._num_glances = num_glances
        self._is_thorough = is_thorough
        self._makes_way = False
        self._backend = backend
        self._landing = landing
        self._connect_s = connect_s
        self._op: Op | None = None
        self._began = 0.0
        self._latency_s = self._rate = self._memcpy_rate = 0.0
        self._is_emulated = False
        self._watches = num_glances > 0
        self._error: ServingError | None = None
        self._is_over = False
        self._steps = self._run()

    @property
    def is_over(self) -> bool:
        """The report is final."""
        return self._is_over

    @property
    def is_quiet(self) -> bool:
        return self._is_over and self._op is None

    def report(self) -> LinkReport:
        return LinkReport(
            backend=self._backend.name,
            mode=self.link.peer.link.mode,
            connect_s=self._connect_s,
            latency_s=self._latency_s,
            bytes_per_s=self._rate,
            memcpy_bytes_per_s=self._memcpy_rate,
            lane="tcp, emulated" if self._is_emulated else self._backend.lane(self.link),
            is_emulated=self._is_emulated,
            error=self._error,
        )

    def fail(self, error: ServingError) -> None:
        """It took too long, or the peer is gone: the report says so now, quiet follows."""
        if not self._is_over:
            self._error, self._is_over = error, True

    def turn(self) -> bool:
        """Go as far as operations are terminal. True if anything moved."""
        moved = False
        while self._op is not None or not self._is_over:
            if self._op is not None and not self._is_terminal(self._op):
                return moved
            moved = True
            op, self._op = self._op, None
            if self._is_over:
                return True
            try:
                if op is not None and op.status.state is OpState.FAILED:
                    outcome = op.status.cause or HandoffOutcome.BACKEND_FAILED
                    raise error_of(outcome, op.status.detail)
                self._op = next(self._steps, None)
                self._is_over = self._op is None
            except ServingError as error:
                self.fail(error)
            if self._makes_way:
                self._makes_way = False
                return True
        return moved

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Op]:
        """Each operation is terminal and was done when the next one is asked for."""
        peer = self.link.peer
        for _ in range(_LATENCY_READS):
            yield self._read(REGION_SLOTS, 0, CELL_BYTES)
            took_s = self._clock.now() - self._began
            try:
                parse_slot(self._landing.view(self.cell)[:CELL_BYTES].tobytes())
            except StaleLease as error:
                raise DigestMismatch(f"{peer.worker_id} by {self._backend.name}: {error.message}") from error
            self._latency_s = min(took_s, self._latency_s or took_s)
        _, num_bytes = region_of(peer, REGION_CANARY)
        self._landing.view(self.cell)[:] = 0
        before = self._backend.socket_bytes(self.link)
        yield from self._read_canary(num_bytes, self._check)
        came_by_socket = self._backend.socket_bytes(self.link) - before
        if peer.link.mode is TransferMode.READ and came_by_socket >= num_bytes:
            self._is_emulated = True
            why = self._backend.explain(self.link)
            raise BackendFailed(
                f"{self._backend.name} reaches {peer.worker_id} only by reads emulated over TCP"
                f" ({came_by_socket} bytes came by sockets){': ' if why else ''}{why}"
            )
        began = self._clock.now()
        num_reads, limit_s = (_THOROUGH_READS, _THOROUGH_S) if self._is_thorough else (_RATE_READS, _RATE_S)
        for _ in range(num_reads):
            self._makes_way = self._is_thorough
            self._measure_memcpy()
            yield from self._read_canary(num_bytes, None)
            if self._clock.now() - began > limit_s:
                break

    def _read_canary(self, num_bytes: int, check: Callable[[list[bytes]], None] | None) -> Iterator[Op]:
        """In pieces of a landing cell: a peer with larger blocks has a larger canary."""
        pieces: list[bytes] = []
        took_s = 0.0
        for offset in range(0, num_bytes, self._landing.cell_bytes):
            size = min(self._landing.cell_bytes, num_bytes - offset)
            yield self._read(REGION_CANARY, offset, size)
            took_s += self._clock.now() - self._began
            if check is not None:
                pieces.append(self._landing.view(self.cell)[:size].tobytes())
        if check is not None:
            check(pieces)
        else:
            self._rate = max(self._rate, num_bytes / max(took_s, 1e-9))

    def _check(self, pieces: list[bytes]) -> None:
        peer = self.link.peer
        if hash_canary(*pieces) != peer.canary_digest:
            raise DigestMismatch(
                f"the canary of {peer.worker_id} read by {self._backend.name} is not what it announced"
            )

    def _measure_memcpy(self) -> None:
        source = self._landing.view(self.cell)
        target = source.copy()
        began = self._clock.now()
        target[:] = source
        self._memcpy_rate = max(self._memcpy_rate, source.nbytes / max(self._clock.now() - began, 1e-9))

    def _read(self, region: str, offset: int, num_bytes: int) -> Op:
        copies = (Copy(offset, self.cell * self._landing.cell_bytes, num_bytes),)
        batch = Batch(remote_region=region, local_region=REGION_LANDING, copies=copies)
        self._began = self._clock.now()
        op = self._backend.post(self.link, batch)
        if self._watches:
            self._watches = self._watch(op)
        return op

    def _watch(self, op: Op) -> bool:
        """True if it was terminal in time."""
        for _ in range(self._num_glances):
            if op.status.state is not OpState.PENDING:
                return True
            time.sleep(_GLANCE_S)
            self._backend.poll(op)
        return op.status.state is not OpState.PENDING

    def _is_terminal(self, op: Op) -> bool:
        return op.status.state is not OpState.PENDING or self._backend.poll(op).state is not OpState.PENDING
