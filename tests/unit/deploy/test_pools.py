"""Pools kept at their sizes over what launcher and router report, in time that the test makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.config import ModelConfigSection, parse_config
from core.errors import WorkerLost
from core.telemetry import Telemetry
from core.types import (
    LauncherReport,
    PoolSize,
    Role,
    WorkerState,
)
from deploy.cluster import worker_spec
from deploy.launcher import ComponentEvent, ComponentSpec, ComponentState, LaunchError
from deploy.pools import FIRST_RETRY_S, LEAVE_MARGIN_S, PoolKeeper
from router.handler import RouterHandler
from tests.unit.router.builders import make_load, make_registration

MODEL = "tiny"
CONFIG = parse_config({"models": [{"name": MODEL, "path": "x", "pools": {"prefill": {}, "decode": {"replicas": 2}}}]})


class Site:
    """A launcher that only notes, and a real router's books behind it."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.handler = RouterHandler(CONFIG, Telemetry(component="router"), self.clock)
        self.running: dict[str, int] = {}
        self.said: list[str] = []
        self.report = LauncherReport(pools=())
        self.keeper = PoolKeeper(CONFIG, self, self.make_spec, say=self.said.append, clock=self.clock)  # type: ignore[arg-type]

    def make_spec(self, section: ModelConfigSection, role: Role, number: int) -> ComponentSpec:
        return worker_spec(CONFIG, section, role, number)

    async def start(self, spec: ComponentSpec) -> None:
        assert spec.name not in self.running
        self.begin(spec.name, pid=1000 + len(self.said) + len(self.running))

    async def stop(self, name: str) -> None:
        self.running.pop(name, None)

    def begin(self, name: str, *, pid: int) -> None:
        self.running[name] = pid
        self.note(name, ComponentState.STARTED, pid=pid)

    def note(self, name: str, state: ComponentState, **facts: object) -> None:
        self.keeper.note(ComponentEvent(component=name, state=state, **facts))  # type: ignore[arg-type]

    def join(
        self, name: str, role: Role, state: WorkerState = WorkerState.READY, incarnation: int = 1, **load: int
    ) -> None:
        registration = replace(make_registration(name, incarnation, role), pid=self.running[name])
        self.note(name, ComponentState.READY)
        self.handler._registry.heartbeat(self.handler._registry.join(registration), make_load(state, **load))

    async def join_all(self) -> None:
        await self.keeper.start()
        for name in list(self.running):
            self.join(name, Role(name.partition("-")[0]))

    async def reconcile(self) -> list[str]:
        """The workers that run afterwards."""
        await self.keeper.reconcile(self)  # type: ignore[arg-type]
        return sorted(self.running)

    async def report_pools(self, report: LauncherReport) -> tuple[PoolSize, ...]:
        self.report = report
        return await self.handler.report_pools(report)

    async def status(self) -> object:
        return await self.handler.status()

    async def drain(self, worker_id: str, reason: str) -> None:
        await self.handler.drain(worker_id, reason)

    async def scale(self, **sizes: int) -> None:
        await self.handler.scale(
            tuple(PoolSize(model=MODEL, role=Role(role), replicas=size) for role, size in sizes.items())
        )

    def draining(self) -> list[str]:
        workers = self.handler._registry.workers()
        return [w.registration.worker_id for w in workers if w.state is WorkerState.DRAINING]


@pytest.fixture
async def site() -> Site:
    site = Site()
    await site.join_all()
    assert await site.reconcile() == ["decode-0", "decode-1", "prefill-0"]
    return site


async def test_a_pool_grows_by_workers_with_new_names_and_shrinks_by_drains(site: Site) -> None:
    await site.scale(decode=3, prefill=2)
    assert await site.reconcile() == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]
    site.join("decode-2", Role.DECODE, num_running=1)
    site.join("decode-0", Role.DECODE, num_running=2)
    await site.scale(decode=2)
    assert len(await site.reconcile()) == 5 and site.draining() == ["decode-1"]
    assert len(await site.reconcile()) == 5, "nobody else goes while it does"
    site.note("decode-1", ComponentState.STOPPED)
    assert await site.reconcile() == ["decode-0", "decode-2", "prefill-0", "prefill-1"]
    assert "decode-1 has left" in site.said


async def test_who_is_not_needed_before_it_serves_is_stopped_at_once(site: Site) -> None:
    await site.scale(decode=4)
    await site.reconcile()
    await site.scale(decode=2)
    assert await site.reconcile() == ["decode-0", "decode-1", "prefill-0"] and not site.draining()


async def test_nobody_who_serves_is_stopped_while_a_new_router_does_not_know_it(site: Site) -> None:
    site.handler = RouterHandler(CONFIG, Telemetry(component="router"), site.clock)
    await site.scale(decode=1)
    before = sorted(site.running)
    assert await site.reconcile() == before
    for name in before:
        site.join(name, Role(name.partition("-")[0]))
    assert await site.reconcile() == before and site.draining() == ["decode-1"]


async def test_who_leaves_unasked_is_replaced_at_once_under_another_name(site: Site) -> None:
    await site.drain("decode-1", "maintenance")
    assert await site.reconcile() == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    site.note("decode-1", ComponentState.STOPPED)
    assert await site.reconcile() == ["decode-0", "decode-2", "prefill-0"]


async def test_a_crash_is_the_supervisors_and_changes_no_pool(site: Site) -> None:
    site.note("decode-1", ComponentState.EXITED, exit_code=137)
    site.note("decode-1", ComponentState.RESTARTING)
    site.begin("decode-1", pid=77)
    assert await site.reconcile() == ["decode-0", "decode-1", "prefill-0"] and not site.draining()


async def test_a_flip_is_not_fought_in_any_of_its_moments(site: Site) -> None:
    await site.handler.flip("decode-1", "")
    before = await site.reconcile()
    site.join("decode-1", Role.DECODE, WorkerState.DRAINING)
    assert await site.reconcile() == before
    registry = site.handler._registry
    registry.part(registry._members["decode-1"].membership)  # type: ignore[index]
    assert await site.reconcile() == before, "nobody knows it for a moment"
    site.join("decode-1", Role.PREFILL, incarnation=2)
    assert await site.reconcile() == before and not site.draining()
    site.begin("decode-1", pid=99)  # it crashed, and begins as what it was started for
    registry.part(registry._members["decode-1"].membership)  # type: ignore[index]
    site.join("decode-1", Role.DECODE, incarnation=3)
    assert await site.reconcile() == [*before, "prefill-1"] and len(site.draining()) == 1


async def test_what_cannot_start_is_told_and_tried_again_later_or_when_somebody_looks(site: Site) -> None:
    await site.scale(decode=3)
    await site.reconcile()
    site.note("decode-2", ComponentState.FAILED, message="asks for 1 CPUs, but 0 are free")
    await site.reconcile()
    await site.reconcile()
    assert "decode-2" in site.running
    (decode,) = [pool for pool in (await site.handler.status()).pools if pool.role is Role.DECODE]
    assert decode.problem == "decode-2: asks for 1 CPUs, but 0 are free"
    site.clock.advance(FIRST_RETRY_S)
    starts = len([line for line in site.said if line == "starting decode-2"])
    await site.reconcile()
    assert len([line for line in site.said if line == "starting decode-2"]) == starts + 1
    site.note("decode-2", ComponentState.FAILED, message="again")
    await site.scale(decode=4)
    await site.reconcile()
    assert await site.reconcile() == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0"]
    site.note("decode-2", ComponentState.WAITING, message="no CPU is free")
    await site.reconcile()
    assert [problem.message for problem in site.report.problems] == ["decode-2: no CPU is free"]


async def test_a_router_that_forgot_hears_the_sizes_and_nobody_is_moved(site: Site) -> None:
    await site.scale(decode=3)
    await site.reconcile()
    site.clock.advance(50.0)
    site.handler = RouterHandler(CONFIG, Telemetry(component="router"), site.clock)
    before = sorted(site.running)
    assert await site.reconcile() == before
    assert {(size.role, size.replicas, size.age_s) for size in site.handler._pools.sizes()} == {
        (Role.PREFILL, 1, None),
        (Role.DECODE, 3, 50.0),
    }


async def test_who_does_not_end_its_drain_is_stopped(site: Site) -> None:
    await site.drain("decode-1", "")
    await site.reconcile()
    site.clock.advance(CONFIG.worker.drain_s + LEAVE_MARGIN_S)
    site.join("decode-1", Role.DECODE, WorkerState.DRAINING)
    assert await site.reconcile() == ["decode-0", "decode-2", "prefill-0"]


async def test_a_router_that_is_away_changes_nothing_and_is_awaited(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(report: LauncherReport) -> tuple[PoolSize, ...]:
        raise WorkerLost("the router is restarting")

    monkeypatch.setattr(site, "report_pools", away)
    before = sorted(site.running)
    with pytest.raises(WorkerLost):
        await site.reconcile()
    assert sorted(site.running) == before


async def test_a_worker_that_the_launcher_refuses_is_not_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(spec: ComponentSpec) -> None:
        raise LaunchError("Ray's driver has ended")

    with monkeypatch.context() as patched:
        patched.setattr(site, "start", refuse)
        await site.scale(decode=3)
        with pytest.raises(LaunchError):
            await site.reconcile()
    assert await site.reconcile() == ["decode-0", "decode-1", "decode-2", "prefill-0"]


async def test_a_flip_between_two_questions_to_the_router_moves_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new sizes and the worker that takes the other role belong together."""
    whole = site.report_pools

    async def then_flip(report: LauncherReport) -> tuple[PoolSize, ...]:
        sizes = await whole(report)
        await site.handler.flip("decode-1", "")
        return sizes

    before = sorted(site.running)
    with monkeypatch.context() as patched:
        patched.setattr(site, "report_pools", then_flip)
        assert await site.reconcile() == before
    assert await site.reconcile() == before and site.draining() == ["decode-1"]
    (worker,) = [w for w in site.handler._registry.workers() if w.registration.worker_id == "decode-1"]
    assert worker.next_role is Role.PREFILL


async def test_who_serves_is_drained_also_before_the_launcher_has_heard_of_it(site: Site) -> None:
    site.note("decode-1", ComponentState.STARTED, pid=site.running["decode-1"])
    await site.scale(decode=1)
    assert await site.reconcile() == ["decode-0", "decode-1", "prefill-0"] and len(site.draining()) == 1
