"""A line for room: nobody overtakes, unless by priority."""

from __future__ import annotations

import asyncio

import pytest

from core.config import PoolConfig
from worker.line import Line


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [5, 1, 3, 1]), ("priority", [5, 1, 1, 3])])
async def test_who_is_served_first(policy: str, expected: list[int]) -> None:
    line = Line(PoolConfig(policy=policy))  # type: ignore[arg-type]
    served: list[int] = []
    room = asyncio.Semaphore(0)

    async def stand(priority: int) -> None:
        with line.join(priority) as place:
            await line.first(place)
            await room.acquire()
            served.append(priority)

    tasks = []
    for priority in (5, 1, 3, 1):  # the first has its turn when the others come
        tasks.append(asyncio.create_task(stand(priority)))
        await asyncio.sleep(0)
    for _ in range(4):
        room.release()
    await asyncio.gather(*tasks)
    assert served == expected and len(line) == 0


async def test_a_lower_number_comes_before_one_that_has_not_found_room_yet() -> None:
    line = Line(PoolConfig(policy="priority"))
    with line.join(5) as first:
        await line.first(first)
        with line.join(1) as urgent:
            await line.first(urgent)
            waiting = asyncio.create_task(line.first(first))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting


async def test_whoever_leaves_lets_the_next_one_on() -> None:
    line = Line(PoolConfig())

    async def stand() -> None:
        with line.join(0) as place:
            await line.first(place)
            await asyncio.Event().wait()

    first, second = asyncio.create_task(stand()), asyncio.create_task(stand())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(line) == 1
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(line) == 0


async def test_whoever_is_preferred_passes_all_others_until_that_is_taken_back() -> None:
    line = Line(PoolConfig())
    with line.join(0) as first, line.join(0) as second:
        await line.first(first)
        line.prefer(second, True)
        await line.first(second)
        waiting = asyncio.create_task(line.first(first))
        await asyncio.sleep(0)
        assert not waiting.done()
        line.prefer(second, False)
        await waiting


async def test_the_oldest_is_first_wherever_it_waited_before() -> None:
    line = Line(PoolConfig())
    with line.join(0, since=5.0) as young, line.join(0, since=1.0) as old:
        await line.first(old)
        assert not young.is_preferred
