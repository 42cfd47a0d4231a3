"""The whole cell behind its handler, without sockets: placing, waiting, membership, gateways, admin, metrics."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.config import ClusterConfig, PoolConfig, parse_config
from core.errors import InvalidRequest, ModelNotFound, NoWorker, StaleIncarnation
from core.ids import PlacementId, RequestId
from core.telemetry import Telemetry
from core.types import (
    CommandKind,
    LauncherReport,
    Mode,
    Placement,
    PlacementEnd,
    PoolProblem,
    PoolSize,
    RequestRecord,
    Role,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from router.handler import RouterHandler
from tests.unit.router.builders import MODEL, chain, make_load, make_registration, make_report, make_request


def make_config(**router: object) -> ClusterConfig:
    return parse_config({"models": [{"name": MODEL, "path": "x"}], "router": router})


class Worker:
    """A worker's end of a membership stream, without a network."""

    def __init__(self, handler: RouterHandler, registration: WorkerRegistration) -> None:
        self._messages: asyncio.Queue[WorkerRegistration | WorkerLoad | None] = asyncio.Queue()
        self.commands: list[WorkerCommand] = []
        self.task = asyncio.create_task(self._run(handler, registration))

    async def _run(self, handler: RouterHandler, registration: WorkerRegistration) -> None:
        async for command in handler.join(registration, self._outgoing()):
            if command.kind is not CommandKind.PEERS:  # see test_introductions.py
                self.commands.append(command)

    async def _outgoing(self) -> AsyncIterator[WorkerRegistration | WorkerLoad]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def say(self, message: WorkerRegistration | WorkerLoad | None) -> None:
        self._messages.put_nowait(message)
        await settle()

    async def vanish(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Cell:
    def __init__(self, **router: object) -> None:
        self.clock = ManualClock(10.0)
        self.telemetry = Telemetry(component="router")
        self.handler = RouterHandler(make_config(**router), self.telemetry, self.clock)
        self.workers: list[Worker] = []
        self.tasks: list[asyncio.Task[Placement]] = []

    async def join(self, name: str, role: Role, incarnation: int = 1, state: WorkerState = WorkerState.READY) -> Worker:
        worker = Worker(self.handler, make_registration(name, incarnation, role))
        self.workers.append(worker)
        await worker.say(make_load(state))
        return worker

    async def place_later(self, **request: object) -> asyncio.Task[Placement]:
        task = asyncio.create_task(self.handler.place(make_request(**request)))  # type: ignore[arg-type]
        self.tasks.append(task)
        await settle()
        return task

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.handler.sweep()

    def metric(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"baton_router_{name}", labels) or 0.0

    async def state_of(self, name: str) -> WorkerState | None:
        status = await self.handler.status()
        return {w.registration.worker_id: w.state for w in status.workers}.get(name)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    cell = Cell()
    yield cell
    for worker in cell.workers:
        await worker.vanish()
    for task in cell.tasks:
        task.cancel()
    await asyncio.gather(*cell.tasks, return_exceptions=True)
    await cell.handler.close()


# -- placing ----------------------------------------------------------------------------------------------------------


async def test_a_request_is_placed_on_a_pair_and_forgotten_at_its_end(cell: Cell) -> None:
    await cell.join("p0", Role.PREFILL)
    await cell.join("d0", Role.DECODE)
    placement = await cell.handler.place(make_request())
    assert placement.mode is Mode.SPLIT and placement.prefill is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d0")
    assert placement.placement_id and placement.handoff_id
    assert (await cell.handler.status()).num_placements == 1
    end = PlacementEnd(
        placement_id=placement.placement_id, request_id=RequestId("r0"), attempt=1, outcome="ok", blamed_worker=None
    )
    await cell.handler.end_placement(end)
    await cell.handler.end_placement(end)
    assert (await cell.handler.status()).num_placements == 0
    assert cell.metric("placements_total", model=MODEL, mode="split", reason="only_path") == 1
    assert cell.metric("placements_ended_total", outcome="ok") == 1


async def test_what_was_placed_for_a_caller_who_did_not_hear_of_it_ends_by_its_attempt(cell: Cell) -> None:
    """He left while the answer was on its way; nobody knows the placement's id."""
    await cell.join("p0", Role.PREFILL)
    await cell.join("d0", Role.DECODE)
    await cell.handler.place(make_request())
    kept = await cell.handler.place(make_request("r1"))
    end = PlacementEnd(placement_id=PlacementId(""), request_id=RequestId("r0"), attempt=1, outcome="cancelled")
    await cell.handler.end_placement(replace(end, attempt=2))
    assert (await cell.handler.status()).num_placements == 2
    await cell.handler.end_placement(end)
    await cell.handler.end_placement(end)
    assert (await cell.handler.status()).num_placements == 1
    assert cell.metric("placements_ended_total", outcome="cancelled") == 1
    await cell.handler.end_placement(replace(end, placement_id=kept.placement_id, request_id=RequestId("r1")))
    assert (await cell.handler.status()).num_placements == 0


async def test_an_end_may_come_with_the_next_request_and_counts_before_its_choice(cell: Cell) -> None:
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await cell.join(name, role)
    first = await cell.handler.place(make_request())
    end = PlacementEnd(placement_id=first.placement_id, request_id=RequestId("r0"), attempt=1, outcome="ok")
    await cell.handler.place(replace(make_request(), ended=(end, end)))
    assert (await cell.handler.status()).num_placements == 1
    assert cell.metric("placements_ended_total", outcome="ok") == 1


async def test_concurrent_requests_spread_over_equal_workers(cell: Cell) -> None:
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await cell.join(name, role)
    placements = [await cell.handler.place(make_request(f"r{i}")) for i in range(8)]
    for leg in ("prefill", "decode"):
        names = [getattr(p, leg).worker_id for p in placements]
        assert sorted(names.count(name) for name in set(names)) == [4, 4], leg


async def test_an_unknown_model_is_refused_at_once_and_a_configured_one_waits(cell: Cell) -> None:
    with pytest.raises(ModelNotFound, match="model 'gpt' is not served here; served: tiny"):
        await cell.handler.place(make_request(model="gpt"))
    assert cell.metric("refusals_total", model="", reason="model_not_found") == 1
    task = await cell.place_later()
    assert not task.done() and (await cell.handler.status()).num_waiting == 1
    cell.pass_time(60.0)
    with pytest.raises(NoWorker, match=r"no ready prefill worker .* and no ready decode worker"):
        await task
    assert cell.metric("refusals_total", model=MODEL, reason="no_worker") == 1


async def test_a_killed_decode_worker_is_waited_for_and_its_next_incarnation_serves(cell: Cell) -> None:
    await cell.join("p0", Role.PREFILL)
    decode = await cell.join("d0", Role.DECODE)
    await decode.vanish()
    assert await cell.state_of("d0") is WorkerState.SUSPECT
    task = await cell.place_later(excluded_workers=(("d0", 1),))
    cell.pass_time(1.0)
    assert not task.done()
    reborn = await cell.join("d0", Role.DECODE, 2, WorkerState.STARTING)
    await settle()
    assert not task.done()
    await reborn.say(make_load(WorkerState.READY))
    placement = await task
    assert placement.decode.incarnation == 2 and placement.queue_s == 1.0


async def test_a_worker_that_dies_for_good_is_removed(cell: Cell) -> None:
    decode = await cell.join("d0", Role.DECODE)
    await decode.vanish()
    cell.pass_time(3.0)
    assert await cell.state_of("d0") is WorkerState.LOST
    cell.pass_time(30.0)
    assert await cell.state_of("d0") is None


# -- membership -------------------------------------------------------------------------------------------------------


async def test_a_replaced_incarnation_is_told_so_on_its_stream(cell: Cell) -> None:
    old = await cell.join("d0", Role.DECODE, 1)
    await cell.join("d0", Role.DECODE, 2)
    with pytest.raises(StaleIncarnation):
        await old.task
    assert await cell.state_of("d0") is WorkerState.READY


async def test_a_worker_that_half_closes_its_stream_is_let_go(cell: Cell) -> None:
    worker = await cell.join("d0", Role.DECODE)
    await worker.say(None)
    await worker.task
    assert await cell.state_of("d0") is WorkerState.SUSPECT


async def test_a_forgotten_worker_registers_again_on_the_same_stream(cell: Cell) -> None:
    worker = await cell.join("d0", Role.DECODE)
    cell.pass_time(40.0)
    await worker.say(make_load())
    assert [command.kind for command in worker.commands] == [CommandKind.JOINED, CommandKind.REREGISTER]
    await worker.say(make_registration("d0", 1))
    await worker.say(make_load())
    assert await cell.state_of("d0") is WorkerState.READY


async def test_a_drain_reaches_the_worker_and_stops_placements_at_once(cell: Cell) -> None:
    await cell.join("p0", Role.PREFILL)
    worker = await cell.join("d0", Role.DECODE)
    await cell.handler.drain("d0", "maintenance")
    task = await cell.place_later()
    assert not task.done()
    assert worker.commands[1:] == [WorkerCommand(kind=CommandKind.DRAIN, reason="maintenance")]
    with pytest.raises(InvalidRequest):
        await cell.handler.drain("d9", "")


async def test_a_flip_reaches_the_worker_and_both_sizes_follow_once(cell: Cell) -> None:
    worker = await cell.join("p0", Role.PREFILL)
    await cell.join("p1", Role.PREFILL)
    await cell.join("d0", Role.DECODE)
    with pytest.raises(
        InvalidRequest, match=f"last prefill worker of '{MODEL}'; first `baton scale {MODEL} prefill=2`"
    ):
        await cell.handler.flip("p0", "")
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.PREFILL, replicas=2),))
    for _ in range(2):  # again changes nothing
        sizes = await cell.handler.flip("p0", "more answers")
        assert {size.role: size.replicas for size in sizes} == {Role.PREFILL: 1, Role.DECODE: 2}
    await settle()
    assert worker.commands[1:] == [
        WorkerCommand(kind=CommandKind.FLIP, reason="more answers", role=Role.DECODE),
    ]
    assert await cell.state_of("p0") is WorkerState.DRAINING
    for name in ("p9", "d0"):
        with pytest.raises(InvalidRequest):
            await cell.handler.flip(name, "")


@pytest.mark.parametrize("setting", [{"num_threads": 2}, {"resources": {"num_gpus": 1}}])
async def test_pools_of_another_shape_are_not_flipped_between(setting: dict[str, object]) -> None:
    config = make_config()
    model = config.models[0]
    pools = {Role.PREFILL: PoolConfig(replicas=2), Role.DECODE: PoolConfig.model_validate(setting)}
    config = config.model_copy(update={"models": (model.model_copy(update={"pools": pools}),)})
    cell = Cell()
    cell.handler = RouterHandler(config, Telemetry(component="router"), cell.clock)
    worker = await cell.join("p0", Role.PREFILL)
    with pytest.raises(InvalidRequest, match=f"{next(iter(setting))} of the prefill and the decode pool"):
        await cell.handler.flip("p0", "")
    await worker.vanish()
    await cell.handler.close()


# -- gateways ---------------------------------------------------------------------------------------------------------


async def test_a_gateway_that_is_replaced_or_lost_gives_its_placements_back(cell: Cell) -> None:
    await cell.join("p0", Role.PREFILL)
    await cell.join("d0", Role.DECODE)
    await cell.handler.report_gateway(make_report("g0", 7))
    await cell.handler.place(make_request(gateway=("g0", 7)))
    await cell.handler.report_gateway(make_report("g0", 8))
    assert (await cell.handler.status()).num_placements == 0
    await cell.handler.place(make_request(gateway=("g0", 8)))
    cell.pass_time(3.0)
    status = await cell.handler.status()
    assert status.num_placements == 0 and status.gateways == ()


async def test_gateways_learn_models_and_whether_they_can_be_served(cell: Cell) -> None:
    view = await cell.handler.report_gateway(make_report())
    assert view.models == () and [(name, ok) for name, ok, _ in view.usable] == [(MODEL, False)]
    await cell.join("p0", Role.PREFILL)
    await cell.join("d0", Role.DECODE)
    view = await cell.handler.report_gateway(make_report())
    assert view.usable == ((MODEL, True, ""),)
    assert (view.models[0].name, view.models[0].block_size) == (MODEL, 16)


# -- admin ------------------------------------------------------------------------------------------------------------


async def test_status_shows_pools_workers_and_gateways(cell: Cell) -> None:
    await cell.join("p0", Role.PREFILL)
    await cell.join("d0", Role.DECODE, state=WorkerState.STARTING)
    await cell.handler.report_gateway(make_report())
    status = await cell.handler.status()
    assert [(p.role, p.desired, p.ready) for p in status.pools] == [(Role.PREFILL, 1, 1), (Role.DECODE, 1, 0)]
    assert [w.registration.pid for w in status.workers] == [4242, 4242]
    assert [g.gateway_id for g in status.gateways] == ["g0"]
    assert status.router_pid > 0 and status.router_incarnation


async def test_watchers_see_the_sizes_now_and_after_each_change(cell: Cell) -> None:
    watch = cell.handler.watch_pools()

    def sizes(pools: tuple[PoolSize, ...]) -> dict[Role, int]:
        return {pool.role: pool.replicas for pool in pools}

    assert sizes(await anext(watch)) == {Role.PREFILL: 1, Role.DECODE: 1}
    later = asyncio.ensure_future(anext(watch))
    await settle()
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=1),))  # no change, no news
    await settle()
    assert not later.done()
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=3),))
    assert sizes(await later) == {Role.PREFILL: 1, Role.DECODE: 3}
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_restarted_router_hears_the_sizes_from_the_launcher_and_the_last_word_counts(cell: Cell) -> None:
    def said(role: Role, replicas: int, age_s: float | None) -> PoolSize:
        return PoolSize(model=MODEL, role=role, replicas=replicas, age_s=age_s)

    async def reported(*pools: PoolSize) -> dict[Role, int]:
        problems = (PoolProblem(model=MODEL, role=Role.DECODE, message="no CPU is free"),)
        sizes = await cell.handler.report_pools(LauncherReport(pools=pools, problems=problems))
        return {size.role: size.replicas for size in sizes}

    cell.pass_time(5.0)
    assert await reported(said(Role.DECODE, 7, None)) == {Role.PREFILL: 1, Role.DECODE: 1}  # only the configuration's
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.PREFILL, replicas=2),))
    cell.pass_time(1.0)
    old = [said(Role.PREFILL, 4, 20.0), said(Role.DECODE, 3, 20.0), said(Role.UNIFIED, 3, 1.0)]
    assert await reported(*old) == {Role.PREFILL: 2, Role.DECODE: 3}
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=1),))
    assert await reported(*old) == {Role.PREFILL: 2, Role.DECODE: 1}
    status = {pool.role: pool.problem for pool in (await cell.handler.status()).pools}
    assert status == {Role.PREFILL: "", Role.DECODE: "no CPU is free"}


async def test_a_pool_that_is_not_configured_cannot_be_scaled(cell: Cell) -> None:
    good = PoolSize(model=MODEL, role=Role.DECODE, replicas=2)
    for bad in (
        PoolSize(model=MODEL, role=Role.UNIFIED, replicas=1),
        PoolSize(model="other", role=Role.DECODE, replicas=1),
        PoolSize(model=MODEL, role=Role.DECODE, replicas=100_000),
    ):
        with pytest.raises(InvalidRequest):
            await cell.handler.scale((good, bad))
    assert {p.role: p.desired for p in (await cell.handler.status()).pools}[Role.DECODE] == 1


async def test_without_a_wanted_prefill_pool_decode_workers_serve_locally(cell: Cell) -> None:
    await cell.join("d0", Role.DECODE)
    task = await cell.place_later()
    assert not task.done()
    await cell.handler.scale((PoolSize(model=MODEL, role=Role.PREFILL, replicas=0),))
    assert (await task).mode is Mode.LOCAL


def make_record(request_id: str) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId(request_id),
        model=MODEL,
        outcome="stop",
        num_prompt_tokens=1,
        num_completion_tokens=1,
        num_cached_tokens=0,
        attempts=1,
        mode="split",
        prefill_worker="p0",
        decode_worker="d0",
        reason="only_path",
        stages=(),
        ttft_s=0.1,
        duration_s=0.2,
    )


async def test_records_are_kept_newest_first_and_bounded() -> None:
    cell = Cell(max_records=3)
    report = make_report()
    records = tuple(make_record(f"r{i}") for i in range(5))
    await cell.handler.report_gateway(replace(report, records=records))

    async def found(request_id: str, limit: int = 0) -> list[str]:
        return [record.request_id for record in (await cell.handler.find_records(request_id, limit)).records]

    assert await found("") == ["r4", "r3", "r2"]
    assert await found("", 1) == ["r4"]
    assert await found("r3") == ["r3"]
    assert await found("r0") == await found("r") == []


async def test_the_ring_says_how_far_back_it_reaches() -> None:
    cell = Cell(max_records=3)
    nothing = await cell.handler.find_records("r0", 0)
    assert (nothing.num_kept, nothing.max_kept, nothing.oldest_age_s) == (0, 3, 0.0)
    for number in range(5):
        cell.clock.advance(60)
        await cell.handler.report_gateway(replace(make_report(), records=(make_record(f"r{number}"),)))
    cell.clock.advance(1)
    asked = await cell.handler.find_records("r0", 0)
    assert (asked.records, asked.num_kept, asked.oldest_age_s) == ((), 3, 121.0)


async def test_the_prompts_of_one_call_are_found_by_its_id(cell: Cell) -> None:
    records = tuple(make_record(request_id) for request_id in ("a", "a-1", "a-2", "ab"))
    await cell.handler.report_gateway(replace(make_report(), records=records))
    found = await cell.handler.find_records("a", 0)
    assert [record.request_id for record in found.records] == ["a-2", "a-1", "a"]


async def test_the_gauge_of_workers_has_every_state_from_the_start(cell: Cell) -> None:
    cell.handler.sweep()
    sample = cell.telemetry.registry.get_sample_value
    name = "baton_router_workers"
    assert sample(name, {"model": MODEL, "role": "decode", "state": "ready"}) == 0.0
    await cell.join("d0", Role.DECODE)
    cell.handler.sweep()
    assert sample(name, {"model": MODEL, "role": "decode", "state": "ready"}) == 1.0
    cell.pass_time(2.0)
    assert sample(name, {"model": MODEL, "role": "decode", "state": "ready"}) == 0.0
    assert sample(name, {"model": MODEL, "role": "decode", "state": "suspect"}) == 1.0


async def test_nothing_remains_when_all_have_gone(cell: Cell) -> None:
    workers = [await cell.join("p0", Role.PREFILL), await cell.join("d0", Role.DECODE)]
    await cell.handler.place(make_request(deadline_s=10.0))
    task = await cell.place_later(model=MODEL, excluded_workers=(("d0", 1), ("p0", 1)), deadline_s=1.0)
    for worker in workers:
        await worker.vanish()
    cell.pass_time(100.0)
    with pytest.raises(NoWorker):
        await task
    cell.pass_time(0.0)
    status = await cell.handler.status()
    assert status.workers == () and status.num_placements == 0 and status.num_waiting == 0
    assert status.models == ()


async def test_an_end_for_an_unknown_placement_is_harmless(cell: Cell) -> None:
    await cell.handler.end_placement(
        PlacementEnd(placement_id=PlacementId("?"), request_id=RequestId("r"), attempt=1, outcome="ok")
    )
    assert cell.metric("placements_ended_total", outcome="ok") == 0


# -- prefixes ---------------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_to_the_worker_that_said_it_holds_its_beginning(cell: Cell) -> None:
    for name in ("u0", "u1", "u2"):
        await cell.join(name, Role.UNIFIED)
    await cell.workers[1].say(make_load(stored_hashes=chain("x", 5)))
    for _ in range(3):
        placement = await cell.handler.place(make_request(block_hashes=chain("x", 6)))
        assert (placement.decode.worker_id, placement.reason) == ("u1", "cached_prefix")
        end = PlacementEnd(placement_id=placement.placement_id, request_id=RequestId("r"), attempt=1, outcome="ok")
        await cell.handler.end_placement(end)
    await cell.workers[1].say(make_load(evicted_hashes=chain("x", 5)))
    assert (await cell.handler.place(make_request(block_hashes=chain("x", 6)))).decode.worker_id != "u1"


async def test_a_burst_with_a_new_prefix_is_not_scattered(cell: Cell) -> None:
    """None of its blocks is reported yet."""
    for name in ("u0", "u1", "u2", "u3"):
        await cell.join(name, Role.UNIFIED)
    for prefix in "xyz":
        burst = []
        for number in range(3):
            hashes = (*chain(prefix, 19), *chain(f"{number}", 1))
            burst.append(await cell.handler.place(make_request(num_prompt_tokens=320, block_hashes=hashes)))
        assert len({placement.decode.worker_id for placement in burst}) == 1, burst


async def test_nothing_is_expected_of_workers_that_keep_no_prefixes(cell: Cell) -> None:
    """A prompt asked again and again would go to one of them for what none of them has."""
    for name in ("u0", "u1"):
        worker = Worker(cell.handler, replace(make_registration(name, 1, Role.UNIFIED), is_caching=False))
        cell.workers.append(worker)
        await worker.say(make_load())
    placed = []
    for _ in range(2):
        placement = await cell.handler.place(make_request(num_prompt_tokens=320, block_hashes=chain("x", 20)))
        assert placement.prediction.num_cached_tokens == 0 and placement.reason != "cached_prefix"
        placed.append(placement.decode.worker_id)
    assert sorted(placed) == ["u0", "u1"]


async def test_what_an_operator_sees_is_not_every_block(cell: Cell) -> None:
    worker = await cell.join("u0", Role.UNIFIED)
    await worker.say(make_load(stored_hashes=chain("x", 5)))
    status = await cell.handler.status()
    assert status.workers[0].load.stored_hashes == ()


async def test_a_restarted_router_knows_every_prefix_as_soon_as_its_workers_are_back() -> None:
    """Whole from one round of heartbeats: what each holds comes with the first of a stream."""
    held = {f"u{number}": chain(f"{number}-", 90) for number in range(4)}
    for _ in range(2):
        cell = Cell()
        try:
            for name, hashes in held.items():
                worker = Worker(cell.handler, make_registration(name, 1, Role.UNIFIED))
                cell.workers.append(worker)
                await worker.say(make_load(stored_hashes=hashes[:50]))
                await worker.say(make_load(stored_hashes=hashes[50:]))
            for name, hashes in held.items():
                placement = await cell.handler.place(make_request(num_prompt_tokens=1440, block_hashes=hashes))
                assert placement.decode.worker_id == name
        finally:
            for worker in cell.workers:
                await worker.vanish()
            await cell.handler.close()


async def test_a_worker_that_joins_again_tells_what_it_holds_now(cell: Cell) -> None:
    await cell.join("u0", Role.UNIFIED)
    await cell.join("u1", Role.UNIFIED)
    await cell.workers[0].say(make_load(stored_hashes=chain("x", 5)))
    again = Worker(cell.handler, make_registration("u0", 1, Role.UNIFIED))
    cell.workers.append(again)
    await again.say(make_load(stored_hashes=chain("y", 5)))
    await cell.workers[0].say(make_load(stored_hashes=chain("x", 5)))  # of the stream before
    assert cell.handler.prefixes.overlaps(chain("x", 5)) == {}
    assert (await cell.handler.place(make_request(block_hashes=chain("y", 6)))).decode.worker_id == "u0"


async def test_a_replaced_worker_leaves_no_prefix_behind(cell: Cell) -> None:
    await cell.join("u0", Role.UNIFIED)
    await cell.workers[0].say(make_load(stored_hashes=chain("x", 5)))
    await cell.join("u0", Role.UNIFIED, incarnation=2)
    cell.pass_time(0.1)
    assert cell.handler.prefixes.overlaps(chain("x", 5)) == {}
    cell.pass_time(0.1)
    assert cell.metric("prefix_blocks") == 0
