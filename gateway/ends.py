"""Ends of placements, told to the router with the next question that it is asked: a call for each costs as much as a
placing."""

import asyncio
import logging
from dataclasses import replace

from core import types as t
from core.errors import Cancelled, DeadlineExceeded, ServingError, WorkerLost
from core.ids import PlacementId
from gateway.legs import Peers
from gateway.ports import RouterPort

log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""When nothing is placed meanwhile. Until then the router counts the load of what has ended."""
RETRY_S = 1.0
"""When the router could not be told. It keeps the room of what has ended until it is, or until the deadline of the
request, so nothing is dropped; a router that has forgotten takes an end as well."""


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
        except (WorkerLost, DeadlineExceeded, asyncio.CancelledError) as error:  # it may not have come so far
            for end in ended:
                self.add(end)
            if isinstance(error, asyncio.CancelledError):
                # It may have been placed all the same, with the answer on its way to nobody.
                self.add(_whatever_was_placed(request))
            raise

    async def _flush(self) -> None:
        pause_s = FLUSH_S
        while True:
            await asyncio.sleep(pause_s)
            ended, self._untold = self._untold, []
            while ended and await self._tell(ended[0]):
                ended.pop(0)
            pause_s = RETRY_S if ended else FLUSH_S
            self._untold = [*ended, *self._untold]
            if not self._untold:
                self._is_flushing = False
                return

    async def _tell(self, end: t.PlacementEnd) -> bool:
        """False: the router was not reached."""
        try:
            await self._router.end_placement(end)
        except (WorkerLost, DeadlineExceeded) as error:
            log.debug("end of placement not told yet", extra={"slug": error.slug})
            return False
        except ServingError as error:
            log.warning("end of placement refused", extra={"slug": error.slug, "reason": error.message})
        return True


def _whatever_was_placed(request: t.PlaceRequest) -> t.PlacementEnd:
    return t.PlacementEnd(
        placement_id=PlacementId(""),
        request_id=request.request_id,
        attempt=request.attempt,
        outcome=Cancelled.slug,
    )
