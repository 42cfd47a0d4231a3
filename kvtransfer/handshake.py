"""From a peer's word to a link in use: each backend that both sides have is tried, measured, and the best one kept.

::

    connect -> PROBING (one backend after the other) -> CHOSEN | REFUSED
      PROBING -- handshake_s | forgotten | closed --> REFUSED

How one is chosen is in choice.py.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import BackendFailed, LayoutMismatch, PeerLost, ServingError, TransferStalled
from core.handoff import PeerInfo
from core.ids import Incarnation, WorkerId
from kvtransfer.backends.base import Backend, Link
from kvtransfer.choice import PairReport, choose, explain
from kvtransfer.memory import Scratch
from kvtransfer.peers import Peers
from kvtransfer.probe import LinkReport, Probe

log = logging.getLogger(__name__)

_RIVAL_S = 0.5
"""So long may the measurement of others take once there is a usable link."""
_MAX_REPORTS = 64


@dataclass(slots=True, eq=False, kw_only=True)
class _Handshake:
    peer: PeerInfo
    links_wanted: list[Future[Link]] = field(default_factory=list)
    reports_wanted: list[Future[PairReport]] = field(default_factory=list)
    untried: deque[Backend] = field(default_factory=deque)
    deadline_at: float
    probe: Probe | None = None
    links: list[tuple[Link | None, LinkReport]] = field(default_factory=list)


class Handshakes:
    """Used by the transfer thread only, but for ``report`` and ``reports``."""

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        landing: Scratch,
        peers: Peers,
        clock: Clock,
        handshake_s: float,
        num_glances: int,
        on_replaced: Callable[[WorkerId, Incarnation], None],
    ) -> None:
        """``backends`` in order of preference. ``on_replaced`` is told of an incarnation that has made way for
        another."""
        self._backends = tuple(backends)
        self._on_replaced = on_replaced
        self._landing = landing
        self._peers = peers
        self._clock = clock
        self._handshake_s = handshake_s
        self._num_glances = num_glances
        self._pending: dict[tuple[WorkerId, Incarnation], _Handshake] = {}
        self._ending: list[Probe] = []
        self._reports: dict[WorkerId, PairReport] = {}
        self.num_connects = 0
        self.num_failed = 0

    @property
    def num_active(self) -> int:
        """Handshakes under way, and those that are over but for an operation that is not."""
        return len(self._pending) + len(self._ending)

    @property
    def is_idle(self) -> bool:
        return self.num_active == 0

    @property
    def is_waiting(self) -> bool:
        """Somebody waits for a link."""
        return bool(self._pending)

    def report(self, peer: PeerInfo) -> PairReport | None:
        """How the link to this incarnation was chosen. From any thread."""
        report = self._reports.get(peer.worker_id)
        return report if report is not None and report.peer.incarnation == peer.incarnation else None

    def reports(self) -> dict[WorkerId, PairReport]:
        """The same for every peer. From any thread."""
        return dict(self._reports)

    def connect(self, peer: PeerInfo, future: Future[Link]) -> None:
        """Resolve ``future`` with the usable link to this incarnation, after its canary was read over it."""
        handshake, is_new = self._enter(peer)
        handshake.links_wanted.append(future)
        if not is_new:
            return
        try:
            link = self._peers.find(peer)
            if link is None:
                self._begin(handshake)
                return
        except ServingError as error:
            self._drop(handshake, error)
        else:
            del self._pending[peer.worker_id, peer.incarnation]
            future.set_result(link)

    def check(self, peer: PeerInfo, future: Future[PairReport]) -> None:
        """Measure every link to this incarnation, one in use included, and choose again. Raises (in the future) what
        keeps a handshake from beginning; that no link is usable is in the report."""
        handshake, is_new = self._enter(peer)
        handshake.reports_wanted.append(future)
        if not is_new:
            return
        try:
            self._peers.find(peer)
            self._begin(handshake)
        except ServingError as error:
            self._drop(handshake, error)

    def forget(self, worker_id: WorkerId, incarnation: Incarnation, error: ServingError) -> None:
        """That process is gone."""
        report = self._reports.get(worker_id)
        if report is not None and report.peer.incarnation == incarnation:
            del self._reports[worker_id]
        handshake = self._pending.get((worker_id, incarnation))
        if handshake is not None:
            self._refuse(handshake, error)

    def refuse_all(self, error: ServingError) -> None:
        for handshake in list(self._pending.values()):
            self._refuse(handshake, error)

    def close(self) -> None:
        """The backends were destroyed: nothing is pending any more."""
        self.refuse_all(BackendFailed("the transfer backend was closed"))
        for probe in self._ending:
            self._landing.free(probe.cell)
        self._ending.clear()

    def turn(self) -> bool:
        """Go on where operations are terminal, then judge time. True if anything moved."""
        moved = False
        for handshake in list(self._pending.values()):
            moved |= self._advance(handshake)
        for probe in self._ending:
            moved |= probe.turn()
        for probe in [probe for probe in self._ending if probe.is_quiet]:
            self._ending.remove(probe)
            self._landing.free(probe.cell)
        now = self._clock.now()
        for handshake in list(self._pending.values()):
            if now >= handshake.deadline_at:
                self._time_out(handshake)
        return moved

    # -- inside -------------------------------------------------------------------------------------------------------

    def _enter(self, peer: PeerInfo) -> tuple[_Handshake, bool]:
        """The handshake with this incarnation, and whether it is new: from now on ``close`` ends who waits for it."""
        key = (peer.worker_id, peer.incarnation)
        is_new = key not in self._pending
        if is_new:
            self._pending[key] = _Handshake(peer=peer, deadline_at=self._clock.now() + self._handshake_s)
        return self._pending[key], is_new

    def _begin(self, handshake: _Handshake) -> None:
        """Raises LayoutMismatch or PeerLost when there is nothing to try."""
        peer = handshake.peer
        self._make_way(peer)
        used = self._peers.usable_to(peer)
        common = [backend for backend in self._backends if peer.by(backend.name) is not None]
        if not common:
            offered = ", ".join(each.backend for each in (peer.link, *peer.other_links))
            mine = ", ".join(backend.name for backend in self._backends)
            raise LayoutMismatch(f"transfer backends differ: {mine} here, {offered} at {peer.worker_id}")
        # The link in use comes first: another one has to be much better.
        handshake.untried += sorted(common, key=lambda each: used is None or used.peer.link.backend != each.name)

    def _drop(self, handshake: _Handshake, error: ServingError) -> None:
        """Nothing could be tried."""
        del self._pending[handshake.peer.worker_id, handshake.peer.incarnation]
        self.num_failed += 1
        for link_wanted in handshake.links_wanted:
            link_wanted.set_exception(error)
        for report_wanted in handshake.reports_wanted:
            report_wanted.set_exception(error)

    def _make_way(self, peer: PeerInfo) -> None:
        """Before a new link: the worker's older incarnations are gone, and a dead link to this one is taken down."""
        probed = [incarnation for worker_id, incarnation in self._pending if worker_id == peer.worker_id]
        for incarnation in (self._peers.current(peer.worker_id), *probed):
            if incarnation is not None and incarnation != peer.incarnation:
                self._on_replaced(peer.worker_id, incarnation)
        dead = self._peers.drop_dead(peer)
        if dead is not None:
            if dead.num_pending:
                self._peers.put_back(dead)
                raise PeerLost(f"{peer.worker_id} was lost and operations on it are still pending")
            self.backend_of(dead).disconnect(dead)

    def backend_of(self, link: Link) -> Backend:
        return next(backend for backend in self._backends if backend.name == link.peer.link.backend)

    def _advance(self, handshake: _Handshake) -> bool:
        probe = handshake.probe
        if probe is None:
            cell = self._landing.allocate()
            if cell is None:
                return False
            self._try_next(handshake, cell)
            return True
        moved = probe.turn()
        if probe.is_over:
            self._retire(handshake, probe)
            self._next_or_conclude(handshake)
        return moved

    def _try_next(self, handshake: _Handshake, cell: int) -> None:
        backend = handshake.untried.popleft()
        peer = handshake.peer.by(backend.name)
        assert peer is not None
        began = self._clock.now()
        try:
            link = backend.connect(peer)
        except ServingError as error:
            self._landing.free(cell)
            took_s = self._clock.now() - began
            report = LinkReport(backend=backend.name, mode=peer.link.mode, connect_s=took_s, error=error)
            handshake.links.append((None, report))
            self._next_or_conclude(handshake)
            return
        took_s = self._clock.now() - began
        self._peers.keep(link)
        handshake.probe = Probe(
            backend,
            link,
            self._landing,
            cell,
            connect_s=took_s,
            clock=self._clock,
            num_glances=self._num_glances,
            is_thorough=bool(handshake.reports_wanted),
        )

    def _retire(self, handshake: _Handshake, probe: Probe) -> None:
        """The probe is over; its cell is given back once it is quiet."""
        handshake.probe = None
        if not probe.is_quiet:
            self.backend_of(probe.link).abort(probe.link)
        handshake.links.append((probe.link, probe.report()))
        self._ending.append(probe)

    def _next_or_conclude(self, handshake: _Handshake) -> None:
        reports = [report for _, report in handshake.links]
        if handshake.untried:
            if any(report.is_usable for report in reports):
                handshake.deadline_at = min(handshake.deadline_at, self._clock.now() + _RIVAL_S)
            return  # tried at the next turn
        chosen = choose(reports)
        if chosen is None:
            self._refuse(handshake, None)
            return
        link = next(link for link, report in handshake.links if report is chosen)
        assert link is not None
        peer = handshake.peer
        report = PairReport(peer=peer, links=tuple(reports), chosen=chosen, reason=explain(reports, chosen))
        self._reports.pop(peer.worker_id, None)
        self._reports[peer.worker_id] = report
        if len(self._reports) > _MAX_REPORTS:
            del self._reports[next(iter(self._reports))]
        self._end(handshake, report, keep=link)
        self.num_connects += 1
        self._peers.add(link)
        log.info(
            "link chosen",
            extra={"peer": peer.worker_id, "backend": chosen.backend, "mode": chosen.mode, "reason": report.reason},
        )
        for future in handshake.links_wanted:
            future.set_result(link)

    def _time_out(self, handshake: _Handshake) -> None:
        """What was not proven by now is not used; a link that was is."""
        error = TransferStalled(f"no link within {self._handshake_s:g} s")
        if handshake.probe is not None:
            handshake.probe.fail(error)
            self._retire(handshake, handshake.probe)
        handshake.untried.clear()
        if any(report.is_usable for _, report in handshake.links):
            self._next_or_conclude(handshake)
        else:
            self._refuse(handshake, error)

    def _refuse(self, handshake: _Handshake, error: ServingError | None) -> None:
        """``error`` is None when no link is usable: the first one's failure says why."""
        if handshake.probe is not None:
            if error is not None:
                handshake.probe.fail(error)
            self._retire(handshake, handshake.probe)
        failures = [report.error for _, report in handshake.links if report.error is not None]
        cause = error or failures[0]
        text = "; ".join(dict.fromkeys(failure.message for failure in [cause, *failures]))
        reports = tuple(report for _, report in handshake.links)
        self._end(handshake, PairReport(peer=handshake.peer, links=reports, chosen=None, reason=text), keep=None)
        self.num_failed += 1
        worker_id = handshake.peer.worker_id
        for future in handshake.links_wanted:
            future.set_exception(type(cause)(f"no link to {worker_id}: {text}", worker_id=worker_id))

    def _end(self, handshake: _Handshake, report: PairReport, *, keep: Link | None) -> None:
        del self._pending[handshake.peer.worker_id, handshake.peer.incarnation]
        for future in handshake.reports_wanted:
            future.set_result(report)
        for link, _ in handshake.links:
            if link is not None and link is not keep:
                self._peers.discard(link)
