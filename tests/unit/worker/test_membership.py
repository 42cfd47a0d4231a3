"""What a worker tells the router of its prefix cache: everything when a stream begins, then what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from core.ids import BlockHash, Incarnation, WorkerId
from core.types import (
    CommandKind,
    ModelRecord,
    Role,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from engine.block_pool import BlockPool
from worker.membership import Membership

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
