"""A pair's handshake: the canary, the choice of a backend, and what happens when none is good."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.errors import (
    BackendFailed,
    DigestMismatch,
    LayoutMismatch,
    PeerLost,
    ServingError,
    StaleIncarnation,
    TransferStalled,
)
from core.handoff import LinkInfo, PeerInfo, TransferMode
from core.ids import new_incarnation
from kvtransfer.backends.base import Batch, Identity, Link
from kvtransfer.backends.inproc import Fabric, Fault, InprocBackend
from kvtransfer.canary import CanaryMemory
from kvtransfer.choice import PairReport, choose
from kvtransfer.fetch import pinned_future
from kvtransfer.layout import Region
from kvtransfer.memory import REGION_CANARY
from kvtransfer.probe import LinkReport
from tests.support.transfer_side import GEOMETRY, Side


class EmulatedBackend(InprocBackend):
    """Says that it is one-sided, but what it reads comes by sockets."""

    name = "nixl"
    received = 0

    def post(self, link: Link, batch: Batch):  # type: ignore[no-untyped-def]
        self.received += batch.num_bytes
        return super().post(link, batch)

    def socket_bytes(self, link: Link) -> int:
        return self.received

    def explain(self, link: Link) -> str:
        return "cma is denied (Operation not permitted)"


class ServedBackend(InprocBackend):
    name = "tcp"

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        return replace(super().open(identity, regions), mode=TransferMode.SERVE)


class World:
    """P and D with their backends, D's loop, and time."""

    def __init__(self, kind: type[InprocBackend] = InprocBackend, *, has_fallback: bool = True) -> None:
        self.fabric, self.other_fabric, self.clock = Fabric(), Fabric(), ManualClock()
        self.kind, self.has_fallback = kind, has_fallback
        self.p, self.d = self.side("P"), self.side("D")
        self.loop = self.d.loop(self.clock)

    def side(self, worker_id: str) -> Side:
        fallback = ServedBackend(self.other_fabric) if self.has_fallback else None
        return Side(self.kind(self.fabric), worker_id, fallback=fallback)

    def connect(self, peer: PeerInfo | None = None) -> Future[Link]:
        future: Future[Link] = pinned_future()
        self.loop.connect(peer or self.p.peer, future)
        for _ in range(100):
            self.loop.turn()
        return future

    def error(self) -> ServingError:
        error = self.connect().exception(0)
        assert isinstance(error, ServingError)
        return error


def test_the_configured_backend_is_used_where_it_is_one_sided() -> None:
    world = World()
    world.fabric.on_done = world.other_fabric.on_done = lambda _: world.clock.advance(0.001)
    link = world.connect().result(0)
    report = world.loop.report(world.p.peer)
    assert link.peer.link.backend == "inproc" and report is not None
    assert report.chosen.mode is TransferMode.READ and report.chosen.latency_s == pytest.approx(0.001)
    assert report.chosen.bytes_per_s == pytest.approx(1000 * world.p.canary.landing.cell_bytes)
    assert world.loop.stats().num_links == 1 and world.loop.is_idle


def test_reads_that_come_by_sockets_are_not_used_and_the_reason_is_kept() -> None:
    world = World(EmulatedBackend)
    link = world.connect().result(0)
    report = world.loop.report(world.p.peer)
    assert link.peer.link.backend == "tcp" and report is not None
    assert report.chosen.mode is TransferMode.SERVE and [each.is_emulated for each in report.links] == [True, False]
    assert "cma is denied" in report.reason and "emulated over TCP" in report.reason
    assert world.loop.stats().num_retired_links == 0, "the other link is taken down"


def test_without_a_fallback_a_pair_whose_reads_are_emulated_is_refused() -> None:
    world = World(EmulatedBackend, has_fallback=False)
    error = world.error()
    assert isinstance(error, BackendFailed) and "emulated over TCP" in error.message
    assert world.loop.stats().num_links == 0 and world.loop.stats().connects_failed == 1


def test_a_canary_that_is_not_what_was_announced_refuses_the_pair() -> None:
    world = World()
    world.p.canary.spoil()
    error = world.error()
    assert isinstance(error, DigestMismatch) and error.worker_id == "P"
    assert "inproc" in error.message and "tcp" in error.message, "both backends were tried"
    assert world.loop.stats().num_links == 0


def test_a_canary_that_one_backend_breaks_is_read_by_the_other() -> None:
    world = World()

    def flip(reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        return Fault(flip=(7, 1)) if batch.remote_region == REGION_CANARY else None

    world.fabric.on_post = flip
    assert world.connect().result(0).peer.link.backend == "tcp"
    world.fabric.on_post = None
    assert world.connect().result(0).peer.link.backend == "tcp", "a chosen link stays"


def test_a_canary_that_hangs_ends_in_time_and_its_cell_comes_back_when_it_is_quiet() -> None:
    world = World(has_fallback=False)
    world.fabric.on_post = lambda *_: Fault(delay_polls=-1)
    future = world.connect()
    assert not future.done()
    world.clock.advance(5.0)
    world.loop.turn()
    assert isinstance(future.exception(0), TransferStalled)
    landing = world.d.canary.landing
    assert landing.num_free == landing.num_cells - 1 and not world.loop.is_idle
    world.fabric.on_post = None
    other = world.side("Q")
    assert world.connect(other.peer).result(0).peer.worker_id == "Q", "others are not held up"
    world.fabric.resume()
    world.loop.turn()
    assert landing.num_free == landing.num_cells and world.loop.is_idle
    assert world.connect().result(0).peer.worker_id == "P", "the same incarnation may be tried again"


def test_a_retry_over_a_link_that_drains_is_not_cut_off() -> None:
    """The link of a failed handshake waits to be taken down; a new handshake over it comes first."""
    world = World(has_fallback=False)
    world.fabric.on_post = lambda *_: Fault(delay_polls=-1)
    world.connect()
    world.clock.advance(5.0)
    world.loop.turn()
    world.fabric.on_post = lambda *_: Fault(delay_polls=30)
    again = world.connect()
    world.fabric.resume()
    world.connect()
    for _ in range(1000):
        world.loop.turn()
    link = again.result(0)
    assert world.d.backend._links == {world.p.peer.link.agent_name: link}


def test_a_worker_that_is_replaced_during_its_handshake_is_refused_at_once() -> None:
    world = World(has_fallback=False)
    world.fabric.on_post = lambda *_: Fault(delay_polls=-1)
    future = world.connect()
    world.loop.forget(world.p.peer.worker_id, world.p.peer.incarnation)
    assert isinstance(future.exception(0), PeerLost)
    assert not world.loop.is_idle, "its operation is observed to its end"


def test_a_peer_without_a_common_backend_is_refused_by_name() -> None:
    world = World(has_fallback=False)
    peer = Side(ServedBackend(world.other_fabric), "Q").peer
    with pytest.raises(LayoutMismatch, match="inproc here, tcp at Q"):
        world.connect(peer).result(0)


def test_larger_blocks_make_a_larger_canary_and_it_is_checked_whole() -> None:
    """The reader's cells are of its own block size: it reads in pieces."""
    world = World(has_fallback=False)
    large = CanaryMemory(new_incarnation(), GEOMETRY).landing.cell_bytes
    world.d.canary.landing.cell_bytes = large // 3
    assert world.connect().result(0)
    world.loop.forget(world.p.peer.worker_id, world.p.peer.incarnation)
    other = world.side("Q")
    other.canary._pattern.data[-1] ^= 1
    assert isinstance(world.connect(other.peer).exception(0), DigestMismatch)


def check(world: World) -> PairReport:
    future: Future[PairReport] = pinned_future()
    world.loop.check(world.p.peer, future)
    for _ in range(300):
        world.loop.turn()
    return future.result(0)


def test_a_check_measures_every_link_again_and_keeps_a_good_one() -> None:
    world = World()
    link = world.connect().result(0)
    found = check(world)
    assert [each.backend for each in found.links] == ["inproc", "tcp"] and found.chosen is found.links[0]
    assert world.loop.link(world.p.peer) is link and world.loop.is_idle
    assert world.loop.stats().num_links == 1 and world.loop.stats().num_retired_links == 0


def test_a_check_leaves_a_link_that_has_gone_bad_and_the_same_start_of_the_peer_stays_welcome() -> None:
    world = World()
    world.connect()

    def flip(reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        return Fault(flip=(7, 1)) if batch.remote_region == REGION_CANARY else None

    world.fabric.on_post = flip
    found = check(world)
    assert found.chosen is not None and found.chosen.backend == "tcp" and "canary" in found.reason
    assert world.connect().result(0).peer.link.backend == "tcp"
    world.other_fabric.on_post = flip
    bad = check(world)
    assert bad.chosen is None and world.loop.link(world.p.peer) is None
    world.fabric.on_post = world.other_fabric.on_post = None
    assert world.connect().result(0), "a later handshake may succeed"


def test_a_rival_that_hangs_holds_a_good_link_up_for_half_a_second_only() -> None:
    world = World()
    world.other_fabric.on_post = lambda *_: Fault(delay_polls=-1)
    future = world.connect()
    assert not future.done()
    world.clock.advance(0.5)
    world.loop.turn()
    assert future.result(0).peer.link.backend == "inproc"


def test_a_check_of_a_start_that_was_replaced_is_refused() -> None:
    world = World()
    world.connect()
    new = Side(InprocBackend(world.fabric), "P")
    world.connect(new.peer)
    future: Future[PairReport] = pinned_future()
    world.loop.check(world.p.peer, future)
    assert isinstance(future.exception(0), StaleIncarnation)


def report(backend: str, rate: float, error: ServingError | None = None) -> LinkReport:
    mode = TransferMode.READ if backend == "nixl" else TransferMode.SERVE
    return LinkReport(backend=backend, mode=mode, connect_s=0, bytes_per_s=rate, error=error)


def test_the_choice_follows_preference_unless_another_is_much_faster() -> None:
    bad = PeerLost("gone")
    nixl, tcp = report("nixl", 1e9), report("tcp", 2e9)
    assert choose([nixl, tcp]) is nixl, "a measurement of milliseconds is not that exact"
    assert choose([nixl, fast := report("tcp", 4e9)]) is fast
    assert choose([report("nixl", 9e9, bad), tcp]) is tcp
    assert choose([report("nixl", 9e9, bad), report("tcp", 9e9, bad)]) is None
