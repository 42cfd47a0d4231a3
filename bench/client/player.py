"""Plays scripts against an endpoint: each at its time whatever became of the others (open loop), or so many clients
that take turns (closed loop)."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.client.endpoint import Endpoint, Said
from bench.client.record import Record
from bench.client.scripts import Script


@dataclass(slots=True, kw_only=True)
class Run:
    """What was played, and what came of it. Grows while it is played."""

    records: list[Record] = field(default_factory=list)
    """In the order in which they ended."""
    started_at: float = 0.0
    ended_at: float = 0.0
    num_sent: int = 0
    max_running: int = 0

    @property
    def num_running(self) -> int:
        return self.num_sent - len(self.records)

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.started_at


class Player:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.run = Run()

    async def play(self, scripts: Iterable[Script], *, concurrency: int | None = None) -> Run:
        """All to their ends. With ``concurrency`` so many at most are played at once: scripts begin when their time has
        come *and* somebody is free."""
        run = self.run
        run.started_at = time.perf_counter()
        places = None if concurrency is None else asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as group:
            for script in scripts:
                said = Said()
                body = self._endpoint.body(script, 0, said)  # before its time has come
                due_at = run.started_at + script.at_s
                if (wait_s := due_at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                if places is not None:
                    await places.acquire()
                    due_at = max(due_at, time.perf_counter())
                task = group.create_task(self._converse(script, said, body, due_at))
                if places is not None:
                    task.add_done_callback(lambda _: places.release())
        run.ended_at = time.perf_counter()
        return run

    async def _converse(self, script: Script, said: Said, body: bytes, due_at: float) -> None:
        run = self.run
        for number in range(len(script.lines)):
            if number:
                due_at = time.perf_counter() + script.lines[number].think_s
                body = self._endpoint.body(script, number, said)
                await asyncio.sleep(due_at - time.perf_counter())
            run.num_sent += 1
            run.max_running = max(run.max_running, run.num_running)
            record = await self._endpoint.ask(script, number, body, due_at=due_at)
            run.records.append(record)
            if not record.is_ok:
                return
            said.answered(record)


async def warm_up(endpoint: Endpoint, scripts: Sequence[Script]) -> None:
    """Played one after the other, and not measured. What they ask is asked by nobody else."""
    await Player(endpoint).play(scripts, concurrency=1)


async def watched(run: Run, show: Callable[[Run], None], *, every_s: float = 1.0) -> None:
    """Calls ``show`` again and again, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        show(run)
