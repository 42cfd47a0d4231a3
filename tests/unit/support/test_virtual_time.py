"""The virtual loop and cluster that fault tests stand on: time is free, processes stop and die, nothing hangs."""

from __future__ import annotations

import asyncio

import pytest

from bench.virtual.loop import NothingLeft, Process, VirtualLoop
from core.handoff import DigestKind
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import answer_to


def test_time_jumps_to_the_next_timer_and_a_wait_for_nothing_is_told() -> None:
    loop = VirtualLoop()

    async def sleeps() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return await asyncio.to_thread(loop.time)

    assert 3605 <= loop.run(sleeps()) < 3605.1
    with pytest.raises(NothingLeft):
        VirtualLoop().run(asyncio.Event().wait())


def test_a_stopped_process_does_nothing_until_it_goes_on_and_a_killed_one_never_again() -> None:
    loop = VirtualLoop()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(loop.time())

    async def main() -> None:
        process = Process("p")
        process.spawn(tick())
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(10)
        assert ticks == [1, 2]
        process.go_on()
        await asyncio.sleep(2)
        process.kill()
        await asyncio.sleep(5)
        assert ticks == [1, 2, 12.5, 13.5]
        await process.bury()
        assert not process.tasks

    loop.run(main())


@pytest.mark.parametrize("digest", list(DigestKind))
def test_requests_run_through_the_virtual_cluster_and_leave_nothing(digest: DigestKind) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        cluster = VirtualCluster(config=make_config(digest=digest), hooks=Hooks(), seed=1)
        for worker_id in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            cluster.start(worker_id, num_blocks=16)
        prompts = [tuple(range(3, 3 + length)) for length in (1, 4, 17, 30, 5, 17)]
        for prompt in prompts:
            cluster.ask(prompt, max_tokens=5)
        assert await cluster.until(lambda: all(answer.is_over for answer in cluster.answers), 30)
        for answer, prompt in zip(cluster.answers, prompts, strict=True):
            assert answer.error is None and answer.tokens == answer_to(prompt, 5)
        assert await cluster.until(lambda: all(worker.is_idle() for worker in cluster.workers), 30)
        await cluster.close()

    loop.run(main())
    assert not loop.errors
