"""Rates: never over the limit in a sliding minute, a wait that is true, and what is given back counts no more."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.windows import PERIOD_S, Memory, Windows
from tests.unit.gateway.access.conftest import Calendar


def windows() -> tuple[Windows, Calendar]:
    calendar = Calendar()
    return Windows(Memory(), calendar), calendar


async def test_a_limit_is_used_up_and_the_wait_is_true() -> None:
    rates, calendar = windows()
    calendar.now += 10
    readings = [await rates.take("k", 1, 2) for _ in range(3)]
    assert [reading.wait_s is None for reading in readings] == [True, True, False]
    assert [reading.remaining for reading in readings] == [1, 0, 0]
    assert readings[0].reset_s == pytest.approx(60), "no more than the window"
    wait_s = readings[2].wait_s
    assert wait_s is not None
    assert 50 < wait_s < 51
    calendar.now += wait_s - 0.01
    assert (await rates.take("k", 1, 2)).wait_s is not None
    calendar.now += 0.01
    assert (await rates.take("k", 1, 2)).wait_s is None


async def test_a_limit_of_one_is_one_in_each_minute() -> None:
    rates, calendar = windows()
    for _ in range(5):
        assert (await rates.take("k", 1, 1)).wait_s is None
        refused = await rates.take("k", 1, 1)
        assert refused.wait_s is not None
        assert refused.wait_s <= PERIOD_S + 1
        calendar.now += refused.wait_s


async def test_more_than_the_limit_never_passes_and_takes_nothing() -> None:
    rates, _ = windows()
    assert (await rates.take("k", 11, 10)).wait_s == math.inf
    assert (await rates.take("k", 10, 10)).wait_s is None


async def test_a_look_takes_nothing() -> None:
    rates, _ = windows()
    for _ in range(3):
        assert (await rates.take("k", 0, 5)).remaining == 5
    assert (await rates.take("k", 0, 5)).reset_s == 0


async def test_what_is_given_back_leaves_the_minute_it_was_taken_in() -> None:
    rates, calendar = windows()
    taken = await rates.take("k", 100, 100)
    calendar.now += 90
    assert (await rates.take("k", 0, 100)).remaining == 50
    await rates.correct("k", taken, -90)
    assert (await rates.take("k", 0, 100)).remaining == 95
    await rates.correct("k", taken, 20)  # more than was reserved counts from now on
    assert (await rates.take("k", 0, 100)).remaining == 75


async def test_takers_at_once_never_have_more_than_the_limit() -> None:
    rates, _ = windows()
    readings = await asyncio.gather(*(rates.take("k", 3, 100) for _ in range(80)))
    assert sum(reading.wait_s is None for reading in readings) == 33


async def test_counters_that_are_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.windows.SWEEP_EVERY", 100)
    memory = Memory()
    for number in range(1000):
        await memory.incr(f"k{number}", expiry=-1)
    assert await memory.incr("kept", expiry=60, amount=5) == 5
    assert await memory.incr("kept", expiry=60, amount=-2) == 3
    assert len(memory.storage) <= 101
    assert await memory.get("kept") == 3


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 45), st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=25),
)
def test_any_history_stays_under_the_limit_and_every_wait_is_true(
    limit: int, steps: list[tuple[float, int, float]]
) -> None:
    async def play() -> None:
        rates, calendar = windows()
        used: dict[int, int] = {}
        for pause_s, amount, unused in steps:
            calendar.now += pause_s
            reading = await rates.take("k", amount, limit)
            if reading.wait_s is None:
                used[reading.minute] = used.get(reading.minute, 0) + amount
                back = int(amount * unused)
                used[reading.minute] -= back
                await rates.correct("k", reading, -back)
            elif reading.wait_s < math.inf:
                calendar.now += reading.wait_s
                again = await rates.take("k", amount, limit)
                assert again.wait_s is None
                used[again.minute] = used.get(again.minute, 0) + amount
            assert max(used.values(), default=0) <= limit
            seen = await rates.take("k", 0, limit)
            assert 0 <= seen.remaining <= limit

    asyncio.run(play())
