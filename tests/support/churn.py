"""Constant load with known answers, while the cluster changes its shape under it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from core.types import ClusterStatus, PoolSize, Role, WorkerState, WorkerStatus
from tests.support.cluster import ProcessCluster

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "Seven plus five is twelve, and twelve plus nine is",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because " * 12,
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 32},
    {"max_tokens": 24, "temperature": 1.0, "seed": 7},
    {"max_tokens": 24, "temperature": 0.8, "seed": 11, "n": 2},
)
SETTLE_S = 240.0


@dataclass
class Load:
    """What became of the requests."""

    cluster: ProcessCluster
    expected: dict[int, list[list[int]]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def num_answered(self) -> int:
        return self.outcomes["ok"]

    async def learn(self) -> None:
        """The answers of the quiet cluster."""
        numbers = range(len(PROMPTS) * len(SETTINGS))
        self.expected = dict(zip(numbers, await asyncio.gather(*map(self._ask, numbers)), strict=True))

    async def _ask(self, number: int) -> list[list[int]]:
        prompt, settings = PROMPTS[number % len(PROMPTS)], SETTINGS[number // len(PROMPTS)]
        answer = await self.cluster.complete(prompt, **settings)
        return [choice["token_ids"] for choice in answer["choices"]]

    async def stream(self, seed: int, stopping: asyncio.Event) -> None:
        """One client that asks again and again."""
        draw = random.Random(seed)
        while not stopping.is_set():
            number, since = draw.randrange(len(self.expected)), time.monotonic()
            try:
                tokens = await self._ask(number)
            except Exception as error:  # whatever it is, it is a failed request
                self.outcomes["failed"] += 1
                self.wrong.append(f"request {number}: {error!r:.500}")
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - since)
            is_right = tokens == self.expected[number]
            self.outcomes["ok" if is_right else "changed"] += 1
            if not is_right:
                self.wrong.append(f"request {number}: {tokens} and not {self.expected[number]}")


@asynccontextmanager
async def under_load(cluster: ProcessCluster, *, num_streams: int) -> AsyncIterator[Load]:
    load, stopping = Load(cluster), asyncio.Event()
    await load.learn()
    streams = [asyncio.create_task(load.stream(seed, stopping)) for seed in range(num_streams)]
    try:
        yield load
    finally:
        stopping.set()
        await asyncio.gather(*streams)


def serving(status: ClusterStatus, model: str, role: Role) -> list[WorkerStatus]:
    """The ready workers of a pool."""
    return [
        w
        for w in status.workers
        if w.state is WorkerState.READY and (w.registration.model.name, w.registration.role) == (model, role)
    ]


async def settled(cluster: ProcessCluster) -> ClusterStatus:
    """Every pool has its size, and nobody is on the way."""
    return await cluster.wait_for(
        "pools of their sizes",
        lambda status: (
            all(pool.ready == pool.desired for pool in status.pools)
            and all(w.state is WorkerState.READY for w in status.workers)
        ),
        SETTLE_S,
    )


async def change_shape(cluster: ProcessCluster, model: str, draw: random.Random) -> str:
    """One scale-down or flip between two settled states, drawn; what was grown for it does not count. Its name."""
    status = await settled(cluster)
    sizes = {pool.role: pool.desired for pool in status.pools if pool.model == model}
    role = draw.choice((Role.PREFILL, Role.DECODE))
    if sizes[role] == 1:
        await cluster.router.scale((PoolSize(model=model, role=role, replicas=2),))
        status = await settled(cluster)
    if draw.random() < 0.5 and sum(sizes.values()) <= 4:
        worker = draw.choice(serving(status, model, role)).registration
        await cluster.router.flip(worker.worker_id, "a drawn change")
        flipped = await settled(cluster)
        (after,) = [w for w in flipped.workers if w.registration.worker_id == worker.worker_id]
        assert after.registration.role is not role and after.registration.pid == worker.pid
        assert after.registration.incarnation != worker.incarnation
        return "flip"
    size = max(sizes[role], 2) - 1
    await cluster.router.scale((PoolSize(model=model, role=role, replicas=size),))
    await settled(cluster)
    return f"{role} scaled down"


async def terminate(cluster: ProcessCluster, model: str, role: Role, *, num_signals: int) -> None:
    """SIGTERM to the process of a serving worker; until it has left and another one serves in its place."""
    worker = serving(await settled(cluster), model, role)[0].registration
    for _ in range(num_signals):
        os.kill(worker.pid, signal.SIGTERM)
    await cluster.wait_for(
        f"the end of {worker.worker_id}",
        lambda status: worker.incarnation not in {w.registration.incarnation for w in status.workers},
        SETTLE_S,
    )
    after = await settled(cluster)
    assert worker.worker_id not in {w.registration.worker_id for w in after.workers}, (
        "its name is not used again at once"
    )
