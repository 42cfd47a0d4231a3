"""Who waits for room in a worker, in the order in which they will be served."""

import asyncio
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.config import PoolConfig


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """A place in the line. ``rank`` is (priority under that policy, since when it is asked for, number of arrival)."""

    rank: tuple[int, float, int]
    is_preferred: bool = False
    """Before all who are not, whatever their ranks. Set through ``Line.prefer``."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)


class Line:
    """The oldest first, or by priority and then so; whoever is preferred comes before all others. Event loop
    only."""

    def __init__(self, config: PoolConfig) -> None:
        self._has_priorities = config.policy == "priority"
        self._num_arrivals = 0
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def join(self, priority: int, *, since: float = 0.0) -> Iterator[Place]:
        """Stand in the line until the block is left. ``since`` tells who is the oldest, wherever it waited before."""
        self._num_arrivals += 1
        place = Place(rank=(priority if self._has_priorities else 0, since, self._num_arrivals))
        insort(self._places, place, key=_order)
        try:
            yield place
        finally:
            self._places.remove(place)
            if self._places:
                self._places[0]._moved.set()

    def prefer(self, place: Place, is_preferred: bool) -> None:
        """Let a place pass all who are not preferred, or take that back."""
        if place.is_preferred != is_preferred:
            place.is_preferred = is_preferred
            self._places.sort(key=_order)
            self._places[0]._moved.set()

    async def first(self, place: Place) -> None:
        """Wait until nobody is ahead. Somebody with a lower number may come later: ask again before each try."""
        while self._places[0] is not place:
            place._moved.clear()
            await place._moved.wait()


def _order(place: Place) -> tuple[bool, tuple[int, float, int]]:
    return not place.is_preferred, place.rank
