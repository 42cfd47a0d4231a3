"""Ends of placements, told to the router with the next question that it is asked: a call for each costs as much as a
placing."""

import asyncio
import logging
from dataclasses import replace

from core import types as t
from core.errors import ServingError, WorkerLost
from gateway.legs import Peers
from gateway.ports import RouterPort

log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""When nothing is placed meanwhile. Until then the router counts the load of what has ended."""


class Ends:
    """What ended at this gateway and the router does not know yet."""

    def __init__(self, router: RouterPort, peers: Peers) -> None:
        self._router = router
        self._peers = peers
        self._untold: list[t.PlacementEnd] = []
        self._is_flushing = False

    def add(self, end: t.PlacementEnd) -> None:
        self._untold.append(end)
        if not self._is_flushing:
            self._is_flushing = True
            self._peers.spawn(self._flush(), name="ends")

    async def told_with(self, request: t.PlaceRequest) -> t.Placement:
        """Places a request. Ends that did not reach the router are told again: it takes each once."""
        ended, self._untold = tuple(self._untold), []
        try:
            return await self._router.place(replace(request, ended=ended) if ended else request)
        except WorkerLost:
            for end in ended:
                self.add(end)
            raise

    async def _flush(self) -> None:
        await asyncio.sleep(FLUSH_S)
        self._is_flushing = False
        ended, self._untold = self._untold, []
        for end in ended:
            try:
                await self._router.end_placement(end)
            except ServingError as error:
                log.debug("end of placement not reported", extra={"slug": error.slug})  # its estimates expire there
