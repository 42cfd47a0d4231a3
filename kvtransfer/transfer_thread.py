"""The one thread that owns the transfer backends: commands in, futures out.

It polls with a short, growing sleep (spinning on a shared core costs a scheduler slice: measured 4.2 ms instead of
0.18 ms) and blocks without waking while there is nothing to do. Every fetch has a deadline, and a limit on time
without progress; what is judged too slow is answered at once, while its blocks stay in custody until its operations
are terminal by poll.

The thread closes the backends however it ends, so every future resolves.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from core.clock import Clock
from core.errors import BackendFailed
from core.handoff import PeerInfo
from core.ids import Incarnation, WorkerId
from core.kv import KVGeometry
from kvtransfer.backends.base import Backend, Link
from kvtransfer.choice import PairReport
from kvtransfer.custody import Custody, CustodyEnd, CustodyStats
from kvtransfer.fetch import Addition, FetchRequest, Then, Transfer, pinned_future
from kvtransfer.memory import Scratch
from kvtransfer.pairs import Pairs
from kvtransfer.probe import NUM_GLANCES
from kvtransfer.transfer_loop import TransferLoop, TransferStats
from kvtransfer.work import Work

_MIN_SLEEP_S = 50e-6
_MAX_SLEEP_S = 1e-3
_REST_SLEEP_S = 20e-3
_JOIN_MARGIN_S = 5.0


class TransferThread:
    """Every method is safe from any thread. The backends are open, and belong to this thread from ``start`` on."""

    def __init__(
        self,
        backend: Backend,
        *,
        fallback: Backend | None = None,
        geometry: KVGeometry,
        scratch: Scratch,
        landing: Scratch,
        custody: Custody,
        clock: Clock,
        name: str,
        stall_s: float = 10.0,
        handshake_s: float = 5.0,
        num_glances: int = NUM_GLANCES,
        pairs: Pairs | None = None,
        on_death: Callable[[], object] | None = None,
        beside: Executor | None = None,
    ) -> None:
        """``fallback`` is for pairs that cannot use ``backend``. ``geometry`` is that of our region ``kv``; ``scratch``
        and ``landing`` were registered with both. ``num_glances`` 0 leaves all polling to
        the turns. ``pairs`` is told what was moved. ``on_death`` is called on the thread when it ends by an error.
        ``beside`` runs what is to be made of blocks that have arrived (one thread, if it is not given); it ends with
        this."""
        self._custody = custody
        self._clock = clock
        self._loop = TransferLoop(
            backend,
            fallback=fallback,
            geometry=geometry,
            scratch=scratch,
            landing=landing,
            custody=custody,
            clock=clock,
            stall_s=stall_s,
            handshake_s=handshake_s,
            num_glances=num_glances,
            pairs=pairs,
        )
        self._on_death = on_death
        self._beside = beside or ThreadPoolExecutor(1, thread_name_prefix=f"{name}-beside")
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepting = True
        self._stop_at: float | None = None
        self._closed_clean = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False before ``start``, and once the thread has ended, by ``stop`` or by an error."""
        return self._thread.is_alive()

    def stop(self, drain_s: float) -> bool:
        """Abandon everything, wait up to ``drain_s`` until it is quiet, destroy the backend. True if it was quiet by
        then.

        Idempotent. An undrained backend is destroyed all the same: the last resort, which over TCP can abort a peer.
        """
        self._submit(partial(self._begin_stop, drain_s))
        if self._thread.ident is None:
            self._end()
        elif self._thread.is_alive():
            self._thread.join(drain_s + _JOIN_MARGIN_S)
        return self._closed_clean and not self._thread.is_alive()

    def connect(self, peer: PeerInfo) -> Future[Link]:
        """A link to this incarnation, proven by reading its canary. Raises (in the future) PeerLost,
        BackendFailed, LayoutMismatch, TransferStalled or StaleIncarnation. Links to older incarnations of the worker
        end at once."""
        future: Future[Link] = pinned_future()
        if not self._submit(partial(self._loop.connect, peer, future)):
            future.set_exception(BackendFailed("the transfer thread has stopped"))
        return future

    def link(self, peer: PeerInfo) -> Link | None:
        """The proven link to this incarnation, if there is one that has not ended."""
        return self._loop.link(peer)

    def check(self, peer: PeerInfo) -> Future[PairReport]:
        """Read the canary over every link to this incarnation again, one in use included, and measure them; the best
        is used from then on. Raises (in the future) LayoutMismatch, PeerLost, BackendFailed or StaleIncarnation where
        nothing could be tried; that no link was good is in the report."""
        future: Future[PairReport] = pinned_future()
        if not self._submit(partial(self._loop.check, peer, future)):
            future.set_exception(BackendFailed("the transfer thread has stopped"))
        return future

    def forget(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """That process is known to be gone (by the router, by its supervisor): fetches from it end with PEER_LOST."""
        self._submit(partial(self._loop.forget, worker_id, incarnation))

    def fetch(self, link: Link, request: FetchRequest) -> Transfer:
        """Start a fetch; the local blocks are in custody when this returns.

        Raises LayoutMismatch for block ids outside the geometries, BackendFailed once the thread has stopped; then
        nothing has changed.
        """
        work = self._loop.begin(link, request)
        transfer = work.transfer
        transfer.bind(
            abandon=partial(self._submit, partial(self._loop.abort, work)),
            more=partial(self._more, work),
            granted=partial(self._submit, partial(self._loop.granted, work)),
        )
        if not self._submit(partial(self._loop.fetch, work)):
            self._custody.end(request.transfer_id, CustodyEnd.NEVER_POSTED)
            raise BackendFailed("the transfer thread has stopped")
        return transfer

    def _more(self, work: Work, parts: Sequence[Addition], is_last: bool, then: Then) -> list[Future[bytes | None]]:
        plans = self._loop.plan_more(work, parts)
        made: list[Future[bytes | None]] = [pinned_future() for _ in parts]
        arrivals: list[Future[bool]] = [pinned_future() for _ in parts]
        for part, arrived, one in zip(parts, arrivals, made, strict=True):
            arrived.add_done_callback(partial(self._after_arrival, partial(then, part.local_blocks), one))
        planned = [] if plans is None else list(zip(plans, arrivals, strict=True))
        if plans is None or not self._submit(partial(self._loop.more, work, planned, is_last=is_last)):
            for arrived in arrivals:
                arrived.set_result(False)
        return made

    def _after_arrival(self, then: Callable[[], bytes], made: "Future[bytes | None]", arrived: "Future[bool]") -> None:
        """Straight from the transfer thread to the one beside it: somebody waits for what is made of the blocks."""
        if arrived.result():
            self._beside.submit(then).add_done_callback(partial(_pass_on, made))
        else:
            made.set_result(None)

    def report(self, peer: PeerInfo) -> PairReport | None:
        """How the link to this incarnation was chosen, once it was."""
        return self._loop.report(peer)

    def reports(self) -> dict[WorkerId, PairReport]:
        """The same for every peer that we have, or had, a link to. Bounded."""
        return self._loop.reports()

    def custody(self) -> CustodyStats:
        return self._custody.stats()

    def stats(self) -> TransferStats:
        return self._loop.stats()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _submit(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._accepting:
                self._commands.put(command)
            return self._accepting

    def _begin_stop(self, drain_s: float) -> None:
        self._stop_at = self._clock.now() + drain_s
        self._loop.abort_all("the worker is stopping")

    def _is_over(self) -> bool:
        return self._stop_at is not None and (self._loop.is_idle or self._clock.now() >= self._stop_at)

    def _run(self) -> None:
        try:
            wait_s: float | None = None
            sleep_s = _MIN_SLEEP_S
            while not self._is_over():
                self._take_commands(wait_s)
                if self._loop.turn():
                    wait_s, sleep_s = 0.0, _MIN_SLEEP_S
                elif self._loop.is_idle:
                    wait_s, sleep_s = None, _MIN_SLEEP_S
                else:
                    limit_s = _REST_SLEEP_S if self._loop.is_resting else _MAX_SLEEP_S
                    wait_s, sleep_s = sleep_s, min(sleep_s * 2, limit_s)
        except BaseException:
            if self._on_death is not None:
                self._on_death()
            raise
        finally:
            self._end()

    def _take_commands(self, wait_s: float | None) -> None:
        """Run what was asked; sleep up to ``wait_s`` (None: for ever) for the first command."""
        try:
            self._commands.get(block=wait_s != 0.0, timeout=wait_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _end(self) -> None:
        with self._lock:
            self._accepting = False
        try:
            self._take_commands(0.0)
        finally:
            self._closed_clean = self._loop.shut_down()
            self._beside.shutdown()


def _pass_on(made: "Future[bytes | None]", done: "Future[bytes]") -> None:
    error = done.exception()
    if error is None:
        made.set_result(done.result())
    else:
        made.set_exception(error)
