"""What a decision of the router costs: ``python -m bench.router``.

A cell of 16 workers with a realistic past: 10,000 cached prefixes, requests under way. Then requests with prompts of
8,000 tokens, one after the other, as they come off the wire: decode, place (walk the prefix index, filter, score, pick,
reserve), encode. Three kinds: a prompt that every worker holds whole, one that begins with a prefix that
some hold, one that is new. CPU time of the thread, each decision by itself. Exit status 1 when a bar is missed.

Beside it, without bars: what heartbeats with changes of caches cost, and the memory of the index.
"""

import argparse
import asyncio
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.bars import Ratio, as_json, show
from core.clock import ManualClock
from core.config import parse_config
from core.ids import BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from core.kv import BlockCounts
from core.telemetry import Telemetry
from core.types import (
    ModelRecord,
    Placement,
    PlacementEnd,
    PlaceRequest,
    Role,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from router.handler import RouterHandler
from rpc.convert import from_pb, message_class, to_pb

BAR_S = 1e-3
MODEL = "m"
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 8000
NUM_PREFIXES = 10_000
PREFIX_BLOCKS = 64
"""Of each cached prefix: 1,024 tokens."""
ROUND_S = 0.05
"""Of the cell's own time, in which a prompt of each kind comes: three times what such workers could read."""
PART = 100
"""Decisions of a kind in a part of the run."""
NUM_OPEN = 256
"""Placements under way."""
POOLS = {
    "8 prefill, 8 decode": {Role.PREFILL: 8, Role.DECODE: 8},
    "16 unified": {Role.UNIFIED: 16},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Decisions of one kind in one cell."""

    pools: str
    prompt: str
    seconds: list[float]
    """CPU time, decision by decision."""

    def parts(self) -> list[list[float]]:
        """The run in parts, each ordered: a machine that others use has good moments and bad ones."""
        return [sorted(self.seconds[first : first + PART]) for first in range(0, len(self.seconds), PART)]

    @property
    def medians_s(self) -> list[float]:
        return [statistics.median(part) for part in self.parts()]

    @property
    def p99s_s(self) -> list[float]:
        return [part[int(0.99 * (len(part) - 1))] for part in self.parts()]

    def __str__(self) -> str:
        told = [
            f"{name} {1e6 * min(times):5.0f} us (mostly {1e6 * statistics.median(times):5.0f})"
            for name, times in (("median", self.medians_s), ("p99", self.p99s_s))
        ]
        return f"{self.pools:20} {self.prompt:21} {'  '.join(told)}  {1 / min(self.medians_s):5.0f} decisions/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one cell, beside its decisions."""

    pools: str
    num_hashes: int
    whole_s: float
    """To take in all of one worker's cached blocks, at the first heartbeats of its stream."""
    num_whole: int
    change_s: float
    """To take in a heartbeat with ``num_changed`` stored and as many evicted."""
    num_changed: int

    def __str__(self) -> str:
        whole_us, change_us = 1e6 * self.whole_s / self.num_whole, 1e6 * self.change_s / (2 * self.num_changed)
        return (
            f"{self.pools:20} {self.num_hashes} different blocks; a worker's {self.num_whole} blocks taken in within "
            f"{1e3 * self.whole_s:.0f} ms ({whole_us:.2f} us each), a change {change_us:.2f} us"
        )


class Cell:
    """A router's handler with workers on streams of their own."""

    def __init__(self, roles: dict[Role, int], rng: random.Random) -> None:
        pools = {str(role): {"replicas": number} for role, number in roles.items()}
        config = parse_config({"models": [{"name": MODEL, "path": "x", "pools": pools}]})
        self.rng = rng
        self.clock = ManualClock(100.0)  # nobody is lost while this machine is busy with something else
        self.handler = RouterHandler(config, Telemetry(component="router"), self.clock)
        self.prefixes = [hashes(rng, PREFIX_BLOCKS) for _ in range(NUM_PREFIXES)]
        self.common = hashes(rng, NUM_PROMPT_TOKENS // BLOCK_SIZE)
        """What every worker holds."""
        self.held: dict[WorkerId, list[BlockHash]] = {}
        self._says: dict[WorkerId, asyncio.Queue[WorkerLoad]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        workers = [f"{role}-{number}" for role, count in roles.items() for number in range(count)]
        for index, prefix in enumerate(self.prefixes):
            self.held.setdefault(WorkerId(workers[index % len(workers)]), list(self.common)).extend(prefix)
        for name in workers:
            self._join(WorkerId(name), Role(name.split("-")[0]))

    def _join(self, name: WorkerId, role: Role) -> None:
        says = self._says[name] = asyncio.Queue()
        registration = WorkerRegistration(
            worker_id=name,
            incarnation=Incarnation(1),
            role=role,
            model=ModelRecord(
                name=MODEL, format_hash="f", block_size=BLOCK_SIZE, max_context=1 << 17, vocab_size=1 << 17
            ),
            address=f"{name}:1",
            http_address=f"{name}:2",
            pid=1,
            hostname=f"host-{len(self._says) % 4}",
            num_blocks=1 << 17,
            block_bytes=1 << 20,
            max_sequences=256,
            max_step_tokens=2048,
            transfer_backend="nixl",
        )

        async def messages() -> AsyncIterator[WorkerLoad]:
            while True:
                yield await says.get()

        async def run() -> None:
            async for _ in self.handler.join(registration, messages()):
                pass

        self._tasks.append(asyncio.create_task(run()))

    async def say(
        self, name: WorkerId, *, stored: Sequence[BlockHash] = (), evicted: Sequence[BlockHash] = ()
    ) -> float:
        """A heartbeat; returns the CPU time of taking it in."""
        rng, total = self.rng, 1 << 17
        in_use, cached = rng.randrange(20_000), rng.randrange(40_000)
        load = WorkerLoad(
            state=WorkerState.READY,
            num_running=rng.randrange(64),
            queued_prompt_tokens=rng.randrange(8000),
            blocks=BlockCounts(
                total=total, custody=0, in_use=in_use, leased=0, cached=cached, free=total - in_use - cached
            ),
            prompt_tokens_computed=1_000_000,
            busy_s=100 + rng.random(),
            stored_hashes=tuple(stored),
            evicted_hashes=tuple(evicted),
        )
        message = to_pb(load)
        started = time.thread_time()
        self._says[name].put_nowait(from_pb(WorkerLoad, message))
        while not self._says[name].empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return time.thread_time() - started

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.handler.close()

    def request(self, number: int, block_hashes: Sequence[BlockHash]) -> PlaceRequest:
        return PlaceRequest(
            request_id=RequestId(f"{number:032x}"),
            model=MODEL,
            attempt=1,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            max_new_tokens=512,
            block_hashes=tuple(block_hashes),
            gateway_id=GatewayId("g"),
            gateway_incarnation=Incarnation(1),
            deadline_s=600,
        )


def hashes(rng: random.Random, number: int) -> list[BlockHash]:
    return [BlockHash(rng.randbytes(16)) for _ in range(number)]


@asynccontextmanager
async def filled_cell(pools: str) -> AsyncIterator[tuple[Cell, Costs]]:
    """A cell whose workers have told everything, and what that cost."""
    cell = Cell(POOLS[pools], random.Random(7))
    try:
        await asyncio.sleep(0)
        times = {name: await cell.say(name, stored=held) for name, held in cell.held.items()}
        num_changed = 256
        changes = []
        for name, held in cell.held.items():
            changes.append(await cell.say(name, stored=hashes(cell.rng, num_changed), evicted=held[-num_changed:]))
            await cell.say(name, stored=held[-num_changed:])
        name = min(times, key=times.__getitem__)
        yield (
            cell,
            Costs(
                pools=pools,
                num_hashes=cell.handler.prefixes.num_hashes,
                whole_s=times[name],
                num_whole=len(cell.held[name]),
                change_s=min(changes),
                num_changed=num_changed,
            ),
        )
    finally:
        await cell.close()


async def decide(cell: Cell, pools: str, num_rounds: int) -> list[Row]:
    """Rows of the three kinds, their decisions taken in turn; heartbeats come in between, as they do."""
    rng, num_blocks = cell.rng, NUM_PROMPT_TOKENS // BLOCK_SIZE
    kinds: dict[str, Callable[[], list[BlockHash]]] = {
        "held by every worker": lambda: cell.common,
        "begins with a prefix": lambda: rng.choice(cell.prefixes) + hashes(rng, num_blocks - PREFIX_BLOCKS),
        "new": lambda: hashes(rng, num_blocks),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    open_: list[Placement] = []
    names = list(cell.held)
    for number in range(num_rounds + NUM_OPEN):
        for kind, make in kinds.items():
            message = to_pb(cell.request(number, make()))
            data = message.SerializeToString()
            started = time.thread_time()
            request = from_pb(PlaceRequest, message_class(PlaceRequest).FromString(data))
            placement = await cell.handler.place(request)
            to_pb(placement).SerializeToString()
            took = time.thread_time() - started
            if number >= NUM_OPEN:  # enough is under way
                seconds[kind].append(took)
            open_.append(placement)
        while len(open_) > NUM_OPEN:
            placement = open_.pop(rng.randrange(len(open_)))
            end = PlacementEnd(
                placement_id=placement.placement_id, request_id=request.request_id, attempt=1, outcome="ok"
            )
            await cell.handler.end_placement(end)
        cell.clock.advance(ROUND_S)
        await cell.say(names[number % len(names)])
        cell.handler.sweep()
    return [Row(pools=pools, prompt=kind, seconds=seconds[kind]) for kind in kinds]


async def measure(num_rounds: int) -> tuple[list[Row], list[Costs]]:
    rows: list[Row] = []
    costs: list[Costs] = []
    for pools in POOLS:
        async with filled_cell(pools) as (cell, cost):
            gc.collect()
            gc.freeze()  # the lists of this bench are no part of a router
            print(cost, flush=True)
            costs.append(cost)
            for row in await decide(cell, pools, num_rounds):
                print(row, flush=True)
                rows.append(row)
        del cell
        gc.unfreeze()
        gc.collect()
    return rows, costs


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Of each cell, the dearest kind of prompt. The best is that of the best part of the run."""
    found = []
    for pools in POOLS:
        mine = [row for row in rows if row.pools == pools]
        for what, figures in (("median", [row.medians_s for row in mine]), ("p99", [row.p99s_s for row in mine])):
            found.append(
                Ratio(
                    name=f"{pools}: {what} over 1 ms",
                    best=max(min(each) for each in figures) / BAR_S,
                    median=max(statistics.median(each) for each in figures) / BAR_S,
                    bar=1.0,
                    is_at_most=True,
                )
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.router", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="decisions of each kind in each cell")
    parser.add_argument("--quick", action="store_true", help="500 of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    rows, costs = asyncio.run(measure(500 if options.quick else options.rounds))
    told = ratios(rows)
    if options.json is not None:
        figures = {
            "machine": platform.platform(),
            "decisions": [
                asdict(replace(row, seconds=[])) | {"medians_s": row.medians_s, "p99s_s": row.p99s_s} for row in rows
            ],
            "index": [asdict(cost) for cost in costs],
            "ratios": as_json(told),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return show(told)


if __name__ == "__main__":
    sys.exit(main())
