"""How a worker's drain ends, in time that the test makes."""

from __future__ import annotations

import asyncio

from core.clock import ManualClock
from worker.drain import Drain


async def test_a_drain_ends_when_nothing_is_left() -> None:
    is_idle = False
    drain = Drain(ManualClock(0.0), limit_s=10.0, is_idle=lambda: is_idle)
    assert drain.left_s is None
    drain.begin()
    finishing = asyncio.ensure_future(drain.finish())
    await asyncio.sleep(0)
    assert not finishing.done() and drain.left_s == 10.0
    is_idle = True
    assert await finishing


async def test_at_its_limit_it_ends_with_something_left() -> None:
    clock = ManualClock(0.0)
    drain = Drain(clock, limit_s=10.0, is_idle=lambda: False)
    drain.begin()
    clock.advance(4.0)
    drain.begin()  # again: its time goes on
    assert drain.left_s == 6.0
    finishing = asyncio.ensure_future(drain.finish())
    clock.advance(6.0)
    assert not await finishing


async def test_who_is_in_a_hurry_does_not_wait_for_the_limit() -> None:
    drain = Drain(ManualClock(0.0), limit_s=1e9, is_idle=lambda: False)
    drain.begin()
    drain.hurry()
    assert drain.left_s == 0.0
    assert not await drain.finish()
