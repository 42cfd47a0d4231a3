"""What a decode worker tells of its pairs: now and then, all of them, with what a person asks first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from core.clock import ManualClock
from core.errors import BackendFailed
from core.handoff import TransferMode
from core.ids import Incarnation, WorkerId
from core.types import PairStatus
from kvtransfer.choice import PairReport
from kvtransfer.circuit import CircuitSettings
from kvtransfer.pairs import Pairs
from kvtransfer.probe import LinkReport
from worker.pair_news import EVERY_S, PairNews

P0, P1 = WorkerId("p0"), WorkerId("p1")
GOOD = LinkReport(
    backend="nixl", mode=TransferMode.READ, connect_s=0.1, bytes_per_s=2e9, memcpy_bytes_per_s=8e9, lane="cma"
)


def news_of(reports: dict[WorkerId, PairReport], pairs: Pairs, clock: ManualClock) -> PairNews:
    context: Any = SimpleNamespace(clock=clock, pairs=pairs, worker_id=WorkerId("d0"))
    transfers: Any = SimpleNamespace(reports=lambda: reports)
    return PairNews(context, transfers)


def report(peer: WorkerId, link: LinkReport | None, reason: str = "") -> PairReport:
    info: Any = SimpleNamespace(worker_id=peer, incarnation=Incarnation(7))
    return PairReport(peer=info, links=() if link is None else (link,), chosen=link, reason=reason)


def test_a_pair_is_told_with_its_link_its_work_and_its_circuit() -> None:
    clock, pairs = ManualClock(50), Pairs(CircuitSettings(num_failures=1))
    pairs.count(P0, num_bytes=1000, num_handoffs=3, post_s=0.25, move_s=0.5)
    pairs.count_failure(P0, BackendFailed.slug)
    circuit = pairs.circuit(P0, Incarnation(7))
    circuit.fail(circuit.begin(), "the wire broke", 50)
    reports = {P0: report(P0, GOOD), P1: report(P1, None, "no link is usable")}
    first, second = news_of(reports, pairs, clock).take()
    assert first == PairStatus(
        prefill=P0,
        prefill_incarnation=Incarnation(7),
        decode=WorkerId("d0"),
        backend="nixl",
        mode="read",
        lane="cma",
        bytes_per_s=2e9,
        memcpy_bytes_per_s=8e9,
        circuit="open",
        why="the wire broke",
        num_bytes=1000,
        busy_s=0.75,
        num_handoffs=3,
        num_failures=1,
    )
    assert (second.backend, second.why, second.circuit) == ("", "no link is usable", "")


def test_heartbeats_in_between_say_nothing_and_who_has_no_pair_says_so_as_soon_as_there_is_one() -> None:
    clock, reports = ManualClock(0), dict[WorkerId, PairReport]()
    news = news_of(reports, Pairs(), clock)
    assert news.take() == ()
    reports[P0] = report(P0, GOOD)
    assert len(news.take()) == 1
    clock.advance(EVERY_S / 2)
    assert news.take() == ()
    clock.advance(EVERY_S / 2)
    assert len(news.take()) == 1
