"""The room where requests wait for a worker that is not there now: bounded in number and in time.

::

    place --> placed                          (a path is there)
          --> waiting --- wake, and a path is there ---------------------> placed
                      --- forgive_s, and a path of once blamed workers --> placed
                      --- placement_wait_s or the request's deadline ----> NoWorker, naming what is missing
                      --- nobody knows the model any more ---------------> ModelNotFound
                      --- the caller is gone ----------------------------> forgotten; a placement just made is released
          --> refused at once: ContextTooLong (no worker could ever hold it), QueueFull (the room is full)

Waiters are served in order of priority, then of age. ``wake`` belongs after every change of members, of their states or
of the desired pools (load alone opens no path), ``tick`` into every sweep.

A worker that failed a request is avoided while there may be another. A small cell has no other: a worker that was only
slow, or a broken connection, would end the request. So exclusions lapse after ``forgive_s`` of waiting; what really is
broken fails again and spends the request's attempts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from core.clock import Clock
from core.errors import ContextTooLong, NoWorker, QueueFull, ServingError
from core.types import Placement, PlaceRequest
from router.policy import Lack, Reason, Shortfall

REPLY_MARGIN_S = 0.25
"""The refusal must reach the gateway before the request's deadline does: a sweep and the way back."""


@dataclass(slots=True, eq=False)
class _Waiter:
    request: PlaceRequest
    since: float
    until: float
    shortfall: Shortfall
    is_forgiving: bool = False
    result: "asyncio.Future[Placement]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def order(self) -> tuple[int, float]:
        return self.request.priority, self.since - self.request.age_s


class WaitingRoom:
    """Waiting in front of ``place_now``, which places or says what is missing, and never waits itself."""

    def __init__(
        self,
        clock: Clock,
        *,
        place_now: Callable[[PlaceRequest], Placement | Shortfall],
        release: Callable[[Placement], None],
        placement_wait_s: float,
        forgive_s: float,
        max_waiting: int,
    ) -> None:
        self._clock = clock
        self._place_now = place_now
        self._release = release
        self._placement_wait_s = placement_wait_s
        self._forgive_s = forgive_s
        self._max_waiting = max_waiting
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def place(self, request: PlaceRequest) -> Placement:
        """A placement, now or later. Raises ContextTooLong, QueueFull or NoWorker."""
        outcome = self._place_now(request)
        if isinstance(outcome, Placement):
            return outcome
        if outcome.lack is Lack.TOO_LONG:
            raise ContextTooLong(outcome.message)
        if len(self._waiters) >= self._max_waiting:
            raise QueueFull(f"{outcome.message}, and {len(self._waiters)} requests wait already; try again later")
        now = self._clock.now()
        wait_s = min(self._placement_wait_s, max(0.0, request.deadline_s - REPLY_MARGIN_S))
        waiter = _Waiter(request=request, since=now, until=now + wait_s, shortfall=outcome)
        self._waiters.append(waiter)
        self._waiters.sort(key=lambda w: w.order)
        try:
            return await waiter.result
        except asyncio.CancelledError:
            if waiter.result.done() and not waiter.result.cancelled() and waiter.result.exception() is None:
                self._release(waiter.result.result())  # placed in the moment in which the caller left
            raise
        finally:
            self._discard(waiter)

    def wake(self) -> None:
        """Place every waiter for whom there is a path now."""
        for waiter in list(self._waiters):
            self._try(waiter)

    def tick(self) -> None:
        """Forgive those who waited for long, and refuse every waiter whose time is over."""
        now = self._clock.now()
        for waiter in list(self._waiters):
            if not waiter.is_forgiving and waiter.request.excluded_workers and now >= waiter.since + self._forgive_s:
                waiter.is_forgiving = True
                self._try(waiter)
            if now >= waiter.until and not waiter.result.done():
                waited = f"none came within {now - waiter.since:.1f} s"
                self._settle(waiter, NoWorker(f"{waiter.shortfall.message}; {waited}"))

    def _try(self, waiter: _Waiter) -> None:
        if waiter.result.done():
            return  # the caller left; its coroutine has not run yet
        waited_s = self._clock.now() - waiter.since
        request = replace(
            waiter.request,
            deadline_s=waiter.request.deadline_s - waited_s,
            age_s=waiter.request.age_s + waited_s,
            excluded_workers=() if waiter.is_forgiving else waiter.request.excluded_workers,
        )
        try:
            outcome = self._place_now(request)
        except ServingError as error:  # the model's last worker has gone meanwhile
            self._settle(waiter, error)
            return
        if isinstance(outcome, Placement):
            chosen = {(w.worker_id, w.incarnation) for w in (outcome.prefill, outcome.decode) if w is not None}
            is_forgiven = not chosen.isdisjoint(waiter.request.excluded_workers)
            reason = Reason.FORGIVEN if is_forgiven else outcome.reason
            self._settle(waiter, replace(outcome, queue_s=waited_s, reason=reason))
            return
        waiter.shortfall = outcome
        if outcome.lack is Lack.TOO_LONG:
            self._settle(waiter, ContextTooLong(outcome.message))

    def _settle(self, waiter: _Waiter, outcome: Placement | ServingError) -> None:
        self._discard(waiter)
        if isinstance(outcome, Placement):
            waiter.result.set_result(outcome)
        else:
            waiter.result.set_exception(outcome)

    def _discard(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
