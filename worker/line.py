"""Who waits for room in a worker, in the order in which they will be served."""

import asyncio
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.config import PoolConfig


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """A place in the line. ``rank`` is (priority under that policy, number of arrival)."""

    rank: tuple[int, int]
    _moved: asyncio.Event = field(default_factory=asyncio.Event)


class Line:
    """First come, first served, or by priority and then so. Event loop only."""

    def __init__(self, config: PoolConfig) -> None:
        self._has_priorities = config.policy == "priority"
        self._num_arrivals = 0
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def join(self, priority: int) -> Iterator[Place]:
        """Stand in the line until the block is left."""
        self._num_arrivals += 1
        place = Place(rank=(priority if self._has_priorities else 0, self._num_arrivals))
        insort(self._places, place, key=lambda each: each.rank)
        try:
            yield place
        finally:
            self._places.remove(place)
            if self._places:
                self._places[0]._moved.set()

    async def first(self, place: Place) -> None:
        """Wait until nobody is ahead. Somebody with a lower number may come later: ask again before each try."""
        while self._places[0] is not place:
            place._moved.clear()
            await place._moved.wait()
