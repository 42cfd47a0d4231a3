"""A worker's membership: one stream to the router with its registration, its load, and the router's commands.

A router that is away changes nothing for running requests: the worker serves on and joins again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from core.errors import ServingError
from core.ids import BlockHash
from core.types import CommandKind, CostSamples, PairStatus, WorkerCommand, WorkerLoad, WorkerRegistration
from engine.prefix_cache import CacheChanges
from rpc.clients import RouterClient

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 0.2, 0.3, 0.5)
"""A router that returns is to know its workers well within two seconds."""
MAX_HASHES = 16_384
"""Of cached blocks in one heartbeat, 0.3 MB on the wire: those of a large cache come in several, at once one after the
other, so that neither a message nor the router's loop is filled by one worker."""


class Membership:
    """Keeps the worker joined until cancelled. ``load`` is asked at every heartbeat, and ``cache_changes`` what became
    of the prefix cache since the last one; the first heartbeats of a stream tell everything (argument true).
    ``take_samples`` is asked for what was measured since, ``take_pairs`` for what there is to tell of pairs."""

    def __init__(
        self,
        router: RouterClient,
        registration: WorkerRegistration,
        *,
        load: Callable[[], WorkerLoad],
        cache_changes: Callable[[bool], CacheChanges],
        take_samples: Callable[[], CostSamples],
        take_pairs: Callable[[], tuple[PairStatus, ...]],
        on_command: Callable[[WorkerCommand], None],
        heartbeat_s: float,
    ) -> None:
        self._router = router
        self._registration = registration
        self._load = load
        self._cache_changes = cache_changes
        self._take_samples = take_samples
        self._take_pairs = take_pairs
        self._on_command = on_command
        self._heartbeat_s = heartbeat_s
        self._now = asyncio.Event()
        self._welcomed = asyncio.Event()
        self.is_joined = False

    def report_now(self) -> None:
        """Send the load at once instead of at the next heartbeat (e.g. when draining begins)."""
        self._now.set()

    async def run(self) -> None:
        """Join, and join again whenever the stream ends."""
        failures = 0
        while True:
            try:
                self._welcomed.clear()
                async for command in self._router.join(self._messages()):
                    failures = 0
                    self.is_joined = True
                    if command.kind is CommandKind.REREGISTER:
                        break
                    self._on_command(command)
                    self._welcomed.set()
            except ServingError as error:
                if self.is_joined or failures == 0:
                    log.warning("not joined to the router", extra={"reason": error.message}, exc_info=error.__cause__)
            self.is_joined = False
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _messages(self) -> AsyncIterator[WorkerRegistration | WorkerLoad]:
        yield self._registration
        # What a worker needs to be of use comes with the welcome: it must have it before anything is placed on it.
        await self._welcomed.wait()
        is_first = True
        while True:
            changes = self._cache_changes(is_first)
            is_first = False
            for stored, evicted in _parts(changes):
                yield replace(
                    self._load(),
                    stored_hashes=stored,
                    evicted_hashes=evicted,
                    samples=self._take_samples(),
                    pairs=self._take_pairs(),
                )
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._now.wait()
            except TimeoutError:
                pass
            self._now.clear()


def _parts(changes: CacheChanges) -> Iterator[tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]]:
    """(stored, evicted) of each heartbeat, one at least. What was evicted comes first: there is room for what was
    stored."""
    stored, evicted = changes.stored, changes.evicted
    while len(evicted) > MAX_HASHES:
        yield (), evicted[:MAX_HASHES]
        evicted = evicted[MAX_HASHES:]
    room = MAX_HASHES - len(evicted)
    yield stored[:room], evicted
    for first in range(room, len(stored), MAX_HASHES):
        yield stored[first : first + MAX_HASHES], ()
