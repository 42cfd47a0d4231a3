"""What is told to who watches the cluster: events, samples, pairs, records; each once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.errors import InvalidRequest
from core.ids import Incarnation, WorkerId
from core.types import ClusterNews, EventKind, PairStatus, PoolSize, Role, WorkerState, WorkerStatus
from router.chronicle import GOES_ON_S, MAX_EVENTS, Chronicle
from router.history import SAMPLE_S, History, quantile
from router.news import MAX_RECORDS
from tests.unit.router.builders import MODEL, make_load, make_registration, make_report
from tests.unit.router.test_handler import Cell, make_record, settle


async def close(cell: Cell) -> None:
    for worker in cell.workers:
        await worker.vanish()
    await cell.handler.close()


def told(news: ClusterNews) -> list[tuple[EventKind, str]]:
    return [(event.kind, event.subject) for event in news.events]


async def test_the_first_news_hold_everything_and_the_next_only_what_is_new() -> None:
    cell = Cell()
    await cell.join("p0", Role.PREFILL)
    await cell.handler.report_gateway(replace(make_report(), records=(make_record("r0"), make_record("r1"))))
    watching = cell.handler.watch(60)
    first = await anext(watching)
    assert (EventKind.JOINED, "p0") in told(first)
    assert (EventKind.JOINED, "g0") in told(first)
    assert [record.request_id for record in first.records] == ["r0", "r1"]
    await cell.join("d0", Role.DECODE)
    second = await anext(watching)  # at once, not after a minute
    assert {subject for _, subject in told(second)} == {"d0"}
    assert second.records == ()
    assert [worker.registration.worker_id for worker in second.status.workers] == ["d0", "p0"]
    await watching.aclose()
    await close(cell)


async def test_each_kind_of_event_is_told_with_its_subject() -> None:
    cell = Cell()
    for name in ("p0", "p1"):
        await cell.join(name, Role.PREFILL)
    d0 = await cell.join("d0", Role.DECODE)
    await cell.join("d1", Role.DECODE)
    watching = cell.handler.watch(60)
    await anext(watching)

    async def happens() -> list[tuple[EventKind, str]]:
        return told(await anext(watching))

    await cell.handler.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=2),))
    assert await happens() == [(EventKind.SCALE, MODEL)]
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=2),))  # nothing changes
    await cell.handler.drain("d1", "")
    assert await happens() == [(EventKind.DRAIN, "d1")]
    await d0.say(make_load(broken_pairs=((WorkerId("p0"), Incarnation(1)),)))
    assert await happens() == [(EventKind.QUARANTINE, "p0 > d0")]
    await d0.say(make_load())
    (mended,) = (await anext(watching)).events
    assert (mended.kind, mended.text) == (EventKind.QUARANTINE, "trusted again")
    await d0.vanish()
    await settle()
    assert await happens() == [(EventKind.SUSPECT, "d0")]
    cell.clock.advance(3)
    cell.handler.sweep()
    assert (EventKind.DEATH, "d0") in await happens()
    await watching.aclose()
    await close(cell)


async def test_a_worker_that_another_incarnation_replaces_has_died() -> None:
    cell = Cell()
    await cell.join("d0", Role.DECODE, 1)
    watching = cell.handler.watch(60)
    await anext(watching)
    await cell.join("d0", Role.DECODE, 2)
    kinds = [kind for kind, _ in told(await anext(watching))]
    assert kinds[0] is EventKind.DEATH
    assert EventKind.JOINED in kinds
    await watching.aclose()
    await close(cell)


async def test_pairs_are_kept_from_the_heartbeat_that_told_them_and_go_with_their_workers() -> None:
    cell = Cell()
    p0 = await cell.join("p0", Role.PREFILL)
    d0 = await cell.join("d0", Role.DECODE)
    pair = PairStatus(
        prefill=WorkerId("p0"), prefill_incarnation=Incarnation(1), decode=WorkerId("d0"), backend="nixl", mode="read"
    )
    watching = cell.handler.watch(0.2)
    await anext(watching)
    await d0.say(make_load(pairs=(pair,)))
    await d0.say(make_load())  # most heartbeats say nothing of them
    assert (await anext(watching)).pairs == (pair,)
    await p0.vanish()
    cell.clock.advance(60)
    cell.handler.sweep()
    assert (await anext(watching)).pairs == ()
    await watching.aclose()
    await close(cell)


async def test_very_many_records_are_told_as_the_newest_of_them() -> None:
    cell = Cell(max_records=2 * MAX_RECORDS)
    watching = cell.handler.watch(60)
    await anext(watching)
    records = tuple(make_record(f"r{number}") for number in range(MAX_RECORDS + 5))
    await cell.handler.report_gateway(replace(make_report(), records=records))
    news = await anext(watching)
    assert [record.request_id for record in news.records] == [f"r{number}" for number in range(5, MAX_RECORDS + 5)]
    await watching.aclose()
    await close(cell)


@pytest.mark.parametrize("interval_s", [0, -1, 0.1, 61, float("nan")])
async def test_a_senseless_interval_is_refused(interval_s: float) -> None:
    cell = Cell()
    with pytest.raises(InvalidRequest, match="interval_s"):
        await anext(cell.handler.watch(interval_s))
    await close(cell)


def test_the_same_again_is_counted_and_told_again_under_its_number() -> None:
    clock = ManualClock(0)
    chronicle = Chronicle(clock)
    for _ in range(3):
        chronicle.note(EventKind.SHED, "m", "refused: queue full")
    (event,) = chronicle.since(0)
    assert (event.number, event.count) == (1, 3)
    version = chronicle.version
    chronicle.note(EventKind.SHED, "m", "refused: too late")
    chronicle.note(EventKind.SHED, "m", "refused: queue full")
    assert [(event.number, event.count) for event in chronicle.since(version)] == [(2, 1), (1, 4)]
    clock.advance(GOES_ON_S + 1)
    chronicle.note(EventKind.SHED, "m", "refused: queue full")
    assert [event.number for event in chronicle.since(0)] == [2, 1, 3]
    assert [event.age_s for event in chronicle.since(0)] == [GOES_ON_S + 1, GOES_ON_S + 1, 0]


def test_events_are_bounded() -> None:
    chronicle = Chronicle(ManualClock(0))
    for number in range(MAX_EVENTS + 10):
        chronicle.note(EventKind.JOINED, f"w{number}", "joined")
    events = chronicle.since(0)
    assert len(events) == MAX_EVENTS
    assert events[0].subject == "w10"


def test_a_sample_has_the_rates_of_its_time_and_the_latencies_of_those_that_ended_in_it() -> None:
    clock = ManualClock(100)
    history = History(clock)
    history.tick(workers := (worker(tokens_generated=100, prompt_tokens_computed=50),), 0)
    assert history.since(0) == ()  # it is not time yet
    clock.advance(SAMPLE_S)
    ended = [
        replace(make_record("a"), ttft_s=0.1, duration_s=1.1, num_completion_tokens=11),
        replace(make_record("b"), ttft_s=0.3, duration_s=0.3, num_completion_tokens=1),
        replace(make_record("c"), ttft_s=0.0, outcome="overloaded", num_completion_tokens=0),
    ]
    history.end(ended)
    history.tick(workers, 3)
    (sample,) = history.since(0)
    assert sample.tokens_per_s == 100 / SAMPLE_S
    assert sample.prompt_tokens_per_s == 50 / SAMPLE_S
    assert (sample.num_ended, sample.num_failed, sample.num_waiting) == (3, 1, 3)
    assert (sample.ttft_p50_s, sample.ttft_p95_s) == (0.1, 0.3)
    assert sample.itl_p50_s == pytest.approx(0.1)
    clock.advance(SAMPLE_S)
    history.tick((worker(tokens_generated=110, prompt_tokens_computed=50),), 0)
    (later,) = history.since(1)
    assert later.tokens_per_s == 10 / SAMPLE_S
    assert later.ttft_p50_s is None
    clock.advance(SAMPLE_S)
    history.tick((worker(incarnation=2, tokens_generated=4),), 0)  # a new life counts from zero
    assert history.since(2)[0].tokens_per_s == 4 / SAMPLE_S


def worker(incarnation: int = 1, **load: int) -> WorkerStatus:
    return WorkerStatus(
        registration=make_registration("d0", incarnation),
        load=make_load(**load),
        state=WorkerState.READY,
        heartbeat_age_s=0,
    )


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([], 0.5) is None
    assert [quantile([1, 2, 3, 4], share) for share in (0, 0.25, 0.5, 0.95, 1)] == [1, 1, 2, 4, 4]
