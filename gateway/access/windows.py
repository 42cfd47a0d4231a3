"""Rates: amounts that a key may take in a minute, over the counters of the `limits` library (memory, Redis, Valkey).

A minute slides: what counts is this minute's amount and the part of the last one that is less than a minute old, as if
it had come evenly. An amount is taken first and looked at then, and given back when it was too much: two gateways can
never take more than the limit together, and a refused request costs nothing. Minutes are numbered from the epoch, and
the number is in the counter's name, so what was taken is given back (a reserved token that was not used) to the minute
it was taken from. The library's own strategies cannot give back; they are not used.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from limits.aio.storage import MemoryStorage, Storage

PERIOD_S = 60
KEPT_S = 3 * PERIOD_S
"""Of a counter's life: its own minute, the next one that still weighs it, and clocks that differ."""
SWEEP_EVERY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one rate stands."""

    limit: int
    remaining: int
    reset_s: float
    """Until all of it is free again, if nothing more is taken. At most a window: what weighs longer weighs little."""
    minute: int
    wait_s: float | None = None
    """Nothing was taken: how long until it can be; None: it was taken (or only looked at)."""


class Memory(MemoryStorage):
    """The library's storage in memory, but for one thing: that looks for expired counters among all of them at each
    step (2 ms with 10,000 keys, measured), this one at each `SWEEP_EVERY`."""

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        now = time.time()
        self._num_steps += 1
        if self._num_steps % SWEEP_EVERY == 0:
            self._forget(now)
        if self.expirations.get(key, 0) <= now:
            self.storage[key] = 0
            self.expirations[key] = now + expiry
        self.storage[key] += amount
        return self.storage[key]

    def _forget(self, now: float) -> None:
        for key in [key for key, ends_at in self.expirations.items() if ends_at <= now]:
            del self.expirations[key], self.storage[key]


class Windows:
    """Raises what the storage raises."""

    def __init__(self, storage: Storage, wall: Callable[[], float]) -> None:
        self._storage = storage
        self._is_local = isinstance(storage, MemoryStorage)
        self._wall = wall

    async def take(self, name: str, amount: int, limit: int) -> Reading:
        """Takes `amount` (0: only looks), or nothing if the rate would be exceeded."""
        minute, passed = self._now()
        if amount > limit:
            now, before = await self._read(name, minute)
            return _reading(limit, now, before, minute, passed, wait_s=math.inf)
        if amount == 0:
            now, before = await self._read(name, minute)
            return _reading(limit, now, before, minute, passed)
        now, before = await self._both(
            self._storage.incr(f"{name}:{minute}", KEPT_S, amount), self._storage.get(f"{name}:{minute - 1}")
        )
        if _weight(now, before, passed) <= limit:
            return _reading(limit, now, before, minute, passed)
        # What others took and give back in this moment is in the number; no more than the limit stays taken.
        now = min(await self._add(name, minute, -amount), limit)
        wait_s = _wait_s(limit - amount, now, before, passed)
        return _reading(limit, now, before, minute, passed, wait_s=wait_s)

    async def correct(self, name: str, reading: Reading, amount: int) -> None:
        """What was taken by `reading` turned out to be `amount` more, or less. More counts now, less counts then."""
        if amount:
            minute = reading.minute if amount < 0 else self._now()[0]
            await self._add(name, minute, amount)

    async def _add(self, name: str, minute: int, amount: int) -> int:
        return await self._storage.incr(f"{name}:{minute}", KEPT_S, amount)

    async def _read(self, name: str, minute: int) -> tuple[int, int]:
        return await self._both(self._storage.get(f"{name}:{minute}"), self._storage.get(f"{name}:{minute - 1}"))

    async def _both(self, first: Awaitable[int], second: Awaitable[int]) -> tuple[int, int]:
        """In one round trip to a server; in memory, tasks would cost more than they do."""
        if self._is_local:
            return await first, await second
        now, before = await asyncio.gather(first, second)
        return now, before

    def _now(self) -> tuple[int, float]:
        """The number of this minute, and how much of it has passed (0 to 1)."""
        minutes = self._wall() / PERIOD_S
        return math.floor(minutes), minutes % 1


def _weight(now: int, before: int, passed: float) -> int:
    """Rounded down, or a limit of one request in a minute would allow one in two."""
    return now + math.floor(max(before, 0) * (1 - passed))


def _wait_s(room: int, now: int, before: int, passed: float) -> float:
    """Until no more than `room` counts, if nothing more is taken: in this minute, or in the next one, where what counts
    now is the last minute's."""
    if now <= room:
        return PERIOD_S * (_light_at(before, room - now) - passed)
    return PERIOD_S * (1 - passed + _light_at(now, room))


def _light_at(before: int, room: int) -> float:
    """How much of a minute must have passed until the last minute's amount weighs no more than `room`."""
    return 0.0 if before <= room else 1 - (room + 1) / before + 1e-6  # just after it is rounded down to `room`


def _reading(limit: int, now: int, before: int, minute: int, passed: float, *, wait_s: float | None = None) -> Reading:
    reset_s = float(PERIOD_S) if now > 0 else PERIOD_S * (1 - passed) if before > 0 else 0.0
    remaining = min(max(limit - _weight(now, before, passed), 0), limit)
    return Reading(limit=limit, remaining=remaining, reset_s=reset_s, minute=minute, wait_s=wait_s)
