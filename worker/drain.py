"""How a worker ends what it does: refuse new work, finish, and at a limit hand back what is unfinished.

::

    (serving) --begin--> FINISHING --idle--> over
                             `--limit_s | hurry--> over: whoever still has work here gets it back, typed WorkerDraining
"""

import asyncio
from collections.abc import Callable

from core.clock import Clock
from core.types import Role

LINGER_S = 0.3
"""Placements that were made before the router knew are on their way: they are told, and do not meet a closed port."""
_IDLE_POLL_S = 0.05


class Drain:
    """One worker's. ``next_role`` may change until the end: the last word counts."""

    def __init__(self, clock: Clock, *, limit_s: float, is_idle: Callable[[], bool]) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._is_idle = is_idle
        self._began_at: float | None = None
        self._is_hurried = asyncio.Event()
        self.next_role: Role | None = None
        """What the worker is rebuilt for afterwards; None: it leaves."""

    @property
    def left_s(self) -> float | None:
        """Until the limit; None while nothing is drained."""
        if self._began_at is None:
            return None
        return 0.0 if self._is_hurried.is_set() else max(0.0, self._began_at + self._limit_s - self._clock.now())

    def begin(self) -> None:
        if self._began_at is None:
            self._began_at = self._clock.now()

    def hurry(self) -> None:
        """Hand back what is unfinished now."""
        self._is_hurried.set()

    async def finish(self) -> bool:
        """Wait until nothing is left. False: the limit came first."""
        await self._wait(LINGER_S)
        while not self._is_idle():
            if self.left_s == 0:
                return False
            await self._wait(_IDLE_POLL_S)
        return True

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._is_hurried.wait()
        except TimeoutError:
            pass
