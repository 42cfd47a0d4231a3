"""One worker process in all its lives, inside the test's own: real router, real engine of a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from baton.roles import make_role
from core.config import ClusterConfig, load_config
from core.errors import WorkerLost
from core.ids import WorkerId
from core.telemetry import Telemetry
from core.types import CommandKind, Role, WorkerCommand, WorkerState, WorkerStatus
from engine.engine import Engine
from router.service import RouterServer
from tests.support.tiny_model import CONFIG, write_folder
from worker.lives import Lives
from worker.process import load_engine

WAIT_S = 60.0
NAME = "prefill-0"


@dataclass
class Process:
    config: ClusterConfig
    router: RouterServer
    engine: Engine
    lives: Lives
    told: list[Mapping[str, str]] = field(default_factory=list)

    def order(self, kind: CommandKind, role: Role | None = None) -> None:
        self.router.handler._registry.order(WorkerId(NAME), WorkerCommand(kind=kind, role=role))

    async def until(self, is_true: Callable[[WorkerStatus], bool]) -> WorkerStatus:
        async with asyncio.timeout(WAIT_S):
            while True:
                for worker in (await self.router.handler.status()).workers:
                    if is_true(worker):
                        return worker
                await asyncio.sleep(0.01)

    async def until_ready(self, role: Role) -> WorkerStatus:
        return await self.until(lambda w: w.state is WorkerState.READY and w.registration.role is role)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    write_folder(tmp_path / "tiny", config=CONFIG)
    settings = (
        *(f"models.0.path={tmp_path / 'tiny'}", "models.0.name=tiny", "models.0.kv.num_blocks=64"),
        *("models.0.pools.decode.max_sequences=5", "router.heartbeat_s=0.05", "worker.pin_threads=false"),
        *("router.listen=127.0.0.1:0", "transfer.backend=tcp"),
    )
    config = load_config(overrides=settings, environ={})
    router = RouterServer(config)
    await router.start()
    section = config.router.model_copy(update={"listen": router.address})
    config = config.model_copy(update={"router": section})
    engine = load_engine(config, config.models[0], Role.PREFILL)
    telemetry = Telemetry(component=NAME)
    lives = Lives(config, config.models[0], worker_id=NAME, engine=engine, make_role=make_role, telemetry=telemetry)
    yield Process(config, router, engine, lives)
    engine.close()
    await router.stop(0.0)


async def test_a_flip_is_a_new_worker_on_the_same_weights_and_nothing_of_the_old_one_is_left(process: Process) -> None:
    running = asyncio.create_task(process.lives.run(Role.PREFILL, process.told.append))
    first = await process.until_ready(Role.PREFILL)
    model, pool = process.engine.model, process.engine.pool
    pool.publish(pool.allocate(2), [b"a" * 16, b"b" * 16])  # type: ignore[list-item]
    pool.free([0, 1])
    assert pool.counts().cached == 2

    process.order(CommandKind.FLIP, Role.DECODE)
    second = await process.until_ready(Role.DECODE)
    mine = second.registration
    assert (mine.worker_id, mine.pid) == (first.registration.worker_id, first.registration.pid)
    assert mine.incarnation != first.registration.incarnation
    assert mine.http_address == first.registration.http_address, "probes find it where it was"
    assert mine.max_sequences == 5, "the other pool's settings hold"
    assert process.engine.model is model and process.engine.pool is not pool
    counts = process.engine.pool.counts()
    assert counts.is_conserved() and counts.free == counts.total == 64
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://{mine.http_address}/ready")).status_code == 200
        assert 'role="decode"' in (await http.get(f"http://{mine.http_address}/metrics")).text

    process.order(CommandKind.FLIP, Role.PREFILL)
    await process.until_ready(Role.PREFILL)
    assert len(process.told) == 3
    process.lives.on_signal("SIGTERM")
    await asyncio.wait_for(running, WAIT_S)
    assert (await process.router.handler.status()).workers == (), "who has left is not called lost"


async def test_the_last_word_on_what_follows_a_drain_counts(process: Process) -> None:
    running = asyncio.create_task(process.lives.run(Role.PREFILL, process.told.append))
    await process.until_ready(Role.PREFILL)
    process.order(CommandKind.FLIP, Role.DECODE)
    process.order(CommandKind.DRAIN)
    await asyncio.wait_for(running, WAIT_S)
    assert len(process.told) == 1


async def test_what_may_still_be_written_to_is_no_ground_for_a_new_life(process: Process) -> None:
    running = asyncio.create_task(process.lives.run(Role.PREFILL, process.told.append))
    await process.until_ready(Role.PREFILL)
    process.engine.pool.take_custody(process.engine.pool.allocate(1))
    process.order(CommandKind.FLIP, Role.DECODE)
    with pytest.raises(WorkerLost, match="cannot become a decode worker in place"):
        await asyncio.wait_for(running, WAIT_S)
