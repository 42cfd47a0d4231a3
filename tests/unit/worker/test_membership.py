"""What a worker tells the router of its prefix cache: everything when a stream begins, then what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from core.ids import BlockHash, Incarnation, WorkerId
from core.types import (
    CommandKind,
    CostSamples,
    ModelRecord,
    Role,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from engine.block_pool import BlockPool
from engine.prefix_cache import CacheChanges
from worker.membership import MAX_HASHES, Membership

REGISTRATION = WorkerRegistration(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation(1),
    role=Role.DECODE,
    model=ModelRecord(name="m", format_hash="", block_size=16, max_context=1, vocab_size=1),
    address="",
    http_address="",
    pid=1,
    hostname="",
    num_blocks=4,
    block_bytes=1,
    max_sequences=1,
    max_step_tokens=1,
    transfer_backend="",
)


class Router:
    """Keeps what the streams brought; a stream ends when told so."""

    def __init__(self) -> None:
        self.streams: list[list[WorkerLoad]] = []
        self.got = asyncio.Event()
        self.ends = asyncio.Event()

    async def join(self, messages: AsyncIterator[WorkerRegistration | WorkerLoad]) -> AsyncIterator[WorkerCommand]:
        loads: list[WorkerLoad] = []
        self.streams.append(loads)
        yield WorkerCommand(kind=CommandKind.JOINED)
        async for message in messages:
            if isinstance(message, WorkerLoad):
                loads.append(message)
                self.got.set()
                if self.ends.is_set():
                    self.ends.clear()
                    return


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


async def test_a_new_stream_hears_everything_and_then_the_changes() -> None:
    pool, router = BlockPool(2), Router()
    membership = Membership(
        router,  # type: ignore[arg-type]
        REGISTRATION,
        load=lambda: WorkerLoad(state=WorkerState.READY, blocks=pool.counts()),
        cache_changes=lambda whole: pool.take_changes(whole=whole),
        take_samples=CostSamples,
        take_pairs=lambda: (),
        on_command=lambda command: None,
        heartbeat_s=60,
    )

    async def next_load() -> tuple[list[BlockHash], list[BlockHash]]:
        async with asyncio.timeout(10):
            await router.got.wait()
        router.got.clear()
        load = router.streams[-1][-1]
        return list(load.stored_hashes), list(load.evicted_hashes)

    blocks = pool.allocate(2)
    pool.publish(blocks, hashes("a", "b"))
    pool.free(blocks)
    running = asyncio.create_task(membership.run())
    try:
        assert await next_load() == (hashes("a", "b"), [])
        pool.publish(pool.allocate(1), hashes("c"))
        membership.report_now()
        assert await next_load() == (hashes("c"), hashes("b"))
        membership.report_now()
        assert await next_load() == ([], [])
        router.ends.set()
        membership.report_now()
        await next_load()
        assert await next_load() == (hashes("a", "c"), []) and len(router.streams) == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_is_too_much_for_one_heartbeat_comes_in_several_at_once() -> None:
    """A large cache fits no message, and the router should not wait for half a minute to hear of it."""
    router = Router()
    stored = tuple(BlockHash(number.to_bytes(16, "big")) for number in range(2 * MAX_HASHES + 5))
    evicted = tuple(BlockHash(number.to_bytes(16, "little")) for number in range(1, MAX_HASHES + 3))
    asked: list[bool] = []

    def cache_changes(whole: bool) -> CacheChanges:
        asked.append(whole)
        return CacheChanges(stored=stored, evicted=() if whole else evicted)

    membership = Membership(
        router,  # type: ignore[arg-type]
        REGISTRATION,
        load=lambda: WorkerLoad(state=WorkerState.READY, blocks=BlockPool(1).counts()),
        cache_changes=cache_changes,
        take_samples=CostSamples,
        take_pairs=lambda: (),
        on_command=lambda command: None,
        heartbeat_s=60,
    )
    running = asyncio.create_task(membership.run())

    async def loads(number: int) -> list[WorkerLoad]:
        async with asyncio.timeout(10):
            while not router.streams or len(router.streams[0]) < number:
                await router.got.wait()
                router.got.clear()
        return router.streams[0][:number]

    try:
        first = await loads(3)
        assert asked == [True]
        assert sum((load.stored_hashes for load in first), ()) == stored
        assert max(len(load.stored_hashes) for load in first) == MAX_HASHES
        membership.report_now()
        changes = (await loads(7))[3:]
        assert asked == [True, False]
        assert sum((load.evicted_hashes for load in changes), ()) == evicted
        assert sum((load.stored_hashes for load in changes), ()) == stored
        assert all(len(load.stored_hashes) + len(load.evicted_hashes) <= MAX_HASHES for load in changes)
        told = [("-" * bool(load.evicted_hashes)) + ("+" * bool(load.stored_hashes)) for load in changes]
        assert told == ["-", "-+", "+", "+"], "what was evicted first: there is room for what was stored"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
