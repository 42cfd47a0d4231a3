"""Keys as requests meet them: cached, so that the database is not on their path, and believed for a stated time only.

A key is looked up when it is first seen and again once what is known is older than ``key_cache_s``; so a revoked key is
refused after that time at most. A database that does not answer is left alone for a moment, and meanwhile a setting
decides: ``open`` believes what was known, ``closed`` refuses. A key that nothing is known of is refused either way.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from core.clock import Clock
from gateway.access.errors import AccessUnknown, StoreAway
from gateway.access.keys import KeyRecord

log = logging.getLogger(__name__)

MAX_CACHED = 10_000
MAX_LOOKUPS = 4
"""At once: strangers with made-up keys cannot use up the database's connections."""
AWAY_PAUSE_S = 1.0
RETRY_AFTER_S = 2.0


class KeyFinder(Protocol):
    async def find_key(self, key_id: str) -> KeyRecord | None: ...


class KeyRing:
    """`find` answers for a key id. Unknown ids are remembered as well; the least used are forgotten first."""

    def __init__(self, finder: KeyFinder, *, cache_s: float, is_open_on_loss: bool, clock: Clock) -> None:
        self._finder = finder
        self._cache_s = cache_s
        self._is_open_on_loss = is_open_on_loss
        self._clock = clock
        self._known: OrderedDict[str, tuple[KeyRecord | None, float]] = OrderedDict()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._away_until: float | None = None

    async def find(self, key_id: str) -> KeyRecord | None:
        """The key, or None if there is none of that id. Raises AccessUnknown when that cannot be told."""
        fresh = self._fresh(key_id)
        if fresh is not None:
            return fresh[0]
        async with self._lookups:
            fresh = self._fresh(key_id)  # who waited here before may have asked for the same key
            if fresh is not None:
                return fresh[0]
            return await self._look_up(key_id)

    def _fresh(self, key_id: str) -> tuple[KeyRecord | None, float] | None:
        known = self._known.get(key_id)
        if known is None or self._clock.now() - known[1] > self._cache_s:
            return None
        self._known.move_to_end(key_id)
        return known

    async def _look_up(self, key_id: str) -> KeyRecord | None:
        asked_at = self._clock.now()  # the answer is as old as the question
        if self._away_until is not None and asked_at < self._away_until:
            return self._without_database(key_id)
        try:
            record = await self._finder.find_key(key_id)
        except StoreAway as error:
            self._away_until = self._clock.now() + AWAY_PAUSE_S
            log.warning("key not looked up", extra={"reason": str(error), "key_id": key_id})
            return self._without_database(key_id)
        self._away_until = None
        self._known[key_id] = (record, asked_at)
        self._known.move_to_end(key_id, last=record is not None)  # made-up keys displace each other, not true ones
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        return record

    def _without_database(self, key_id: str) -> KeyRecord | None:
        known = self._known.get(key_id)
        if known is None or known[0] is None or not self._is_open_on_loss:
            raise AccessUnknown(
                "API keys cannot be checked at the moment; try again shortly", retry_after_s=RETRY_AFTER_S
            )
        return known[0]
