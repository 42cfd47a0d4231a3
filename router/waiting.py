"""Where requests wait that cannot be placed now: one queue for each model, bounded in number and in time.

::

    place --> placed                          (a path is there, it has room, and nobody waits for that room)
          --> waiting --- wake, and it is this one's turn ----------------------> placed
                      --- forgive_s, and a path of once blamed workers ---------> placed
                      --- max_wait_s without room ------------------------------> Overloaded
                      --- placement_wait_s without a path, or the deadline -----> NoWorker, naming what is missing
                      --- another one took its place in a full queue -----------> TooManyWaiting
                      --- nobody knows the model any more ----------------------> ModelNotFound
                      --- the caller is gone -----------------------------------> forgotten; a placement is released
          --> refused at once: ContextTooLong (no worker could ever hold it), TooManyWaiting or QueueFull (the queue is
              full), Overloaded (what waits ahead would take longer than it may wait, as fast as the queue is served)

Who is next says :mod:`router.fair_queue`. Those who lack a worker hold up nobody. One that lacks room may be overtaken
by others that need less, ``MAX_OVERTAKEN`` times; then all wait behind it. ``wake`` belongs after every change of
members, of their states or of the desired pools, ``wake_for_room`` after every word about their load, ``tick`` into
every sweep.

A worker that failed a request is avoided while there may be another. A small cell has no other: a worker that was only
slow, or a broken connection, would end the request. So exclusions lapse after ``forgive_s`` of waiting; what really is
broken fails again and spends the request's attempts. A request that was placed before keeps its age, is not refused for
a full queue, and what its tenant was charged is given back by the end of that placement.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from core.clock import Clock
from core.errors import ContextTooLong, NoWorker, Overloaded, QueueFull, ServingError, TooManyWaiting
from core.priority import PriorityClass
from core.types import Placement, PlaceRequest
from router.drain_rate import DrainRate
from router.fair_queue import FairQueue, Full, Ticket
from router.policy import Lack, Reason, Shortfall

REPLY_MARGIN_S = 0.25
"""The refusal must reach the gateway before the request's deadline does: a sweep and the way back."""
MAX_OVERTAKEN = 8
MAX_TRIES = 4
"""So many of the first in turn that lack room are tried: the others behind them stand in line."""
CONFIDENCE = 0.75
"""Of the time that a request may wait, what its predicted wait may take: others come meanwhile, some of them first."""
GENERATED_WEIGHT = 2.0
"""What a generated token costs of a tenant's share, over one of a prompt."""


class Refusal(StrEnum):
    """Why a request was not placed; a label of the metrics, so the set is closed."""

    QUEUE_FULL = "queue_full"
    TENANT_SHARE = "tenant_share"
    """The queue is full, and nobody has more in it than this tenant."""
    DISPLACED = "displaced"
    TOO_LATE = "too_late"
    """It would have waited for longer than it may."""
    WAITED_OUT = "waited_out"
    NO_WORKER = "no_worker"


@dataclass(slots=True, eq=False)
class _Waiter:
    request: PlaceRequest
    ticket: Ticket
    since: float
    shortfall: Shortfall
    until: float = 0.0
    tried_at: int = 0
    """The version of the cell for which its shortfall holds."""
    num_overtaken: int = 0
    is_forgiving: bool = False
    result: "asyncio.Future[Placement]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def lacks_room(self) -> bool:
        return self.shortfall.lack is Lack.NO_ROOM


class _Queue:
    """Of one model."""

    def __init__(self, max_waiting: int) -> None:
        self.tickets = FairQueue(max_waiting)
        self.waiters: dict[Ticket, _Waiter] = {}
        self.rate = DrainRate()
        self.rates: dict[tuple[str, PriorityClass], DrainRate] = {}
        """Of tenants that wait or did lately, by class: others go before them, now and later."""

    def in_turn(self) -> Iterator[_Waiter]:
        return (self.waiters[ticket] for ticket in self.tickets.in_turn())

    def note_waiting(self, ticket: Ticket, now: float) -> None:
        """A ticket came or went. Who waits for room: only then the rate at which requests leave is what can be had."""
        self.rate.waiting(self.lacking_room is not None, now)
        lane = (ticket.tenant, ticket.priority_class)
        self.rates.setdefault(lane, DrainRate()).waiting(self.tickets.has_waiting(*lane), now)

    def forget(self, now: float) -> None:
        """Tenants that have not waited for long."""
        for lane in [lane for lane, rate in self.rates.items() if rate.is_over(now)]:
            del self.rates[lane]

    def note_served(self, ticket: Ticket, now: float) -> None:
        self.rate.note(ticket.cost, now)
        lane = (ticket.tenant, ticket.priority_class)
        if lane in self.rates:
            self.rates[lane].note(ticket.cost, now)

    def predict(self, ticket: Ticket, now: float) -> tuple[float, float, float] | None:
        """(seconds that a ticket which comes now would wait, weighted tokens ahead of it, a second); None: not known.

        By what is ahead of it now and as fast as all of that is served; and by what is ahead of its own tenant's, as
        fast as that is served beside those who keep coming with a better right.
        """
        found = []
        rate = self.rate.per_s(now)
        if rate:
            work = self.tickets.work_ahead(ticket.tenant, ticket.priority)
            found.append((work / rate, work, rate))
        lane = self.rates.get((ticket.tenant, ticket.priority_class))
        own_rate = None if lane is None else lane.share_per_s(now, self.rate, ticket.cost)
        if own_rate:
            work = self.tickets.own_work_ahead(ticket.tenant, ticket.priority) + ticket.cost
            found.append((work / own_rate, work, own_rate))
        return max(found, default=None)

    @property
    def lacking_room(self) -> Shortfall | None:
        """What one of those lacks who wait for room; None when nobody does."""
        return next((waiter.shortfall for waiter in self.waiters.values() if waiter.lacks_room), None)


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
        max_wait_s: float = 30.0,
        projected_tokens: int = 256,
        on_refusal: Callable[[PlaceRequest, Refusal], None] = lambda request, refusal: None,
    ) -> None:
        """``placement_wait_s`` bounds the wait for a worker, ``max_wait_s`` that for room. ``max_waiting`` is for each
        model."""
        self._clock = clock
        self._place_now = place_now
        self._release = release
        self._placement_wait_s = placement_wait_s
        self._max_wait_s = max_wait_s
        self._forgive_s = forgive_s
        self._max_waiting = max_waiting
        self._projected_tokens = projected_tokens
        self._on_refusal = on_refusal
        self._queues: dict[str, _Queue] = {}
        self._version = 1
        self._changed_at = 1
        """The version at which workers came, went or changed their state."""

    def __len__(self) -> int:
        return sum(len(queue.waiters) for queue in self._queues.values())

    def lengths(self) -> Iterator[tuple[str, PriorityClass, int]]:
        """(model, class, requests that wait)."""
        for model, queue in self._queues.items():
            for priority_class in PriorityClass:
                yield model, priority_class, queue.tickets.num_waiting(priority_class)

    async def place(self, request: PlaceRequest) -> Placement:
        """A placement, now or later. Raises ContextTooLong, TooManyWaiting, QueueFull, Overloaded or NoWorker."""
        known = self._queues.get(request.model)
        lacking = known.lacking_room if known is not None else None
        if lacking is None:
            outcome = self._place_now(request)
            if isinstance(outcome, Placement):
                self._charge(request)
                return outcome
            if outcome.lack is Lack.TOO_LONG:
                raise ContextTooLong(outcome.message)
            lacking = outcome
        queue = self._queues.setdefault(request.model, _Queue(self._max_waiting))
        waiter = self._enter(queue, request, lacking, is_tried=known is None or known.lacking_room is None)
        try:
            if waiter.tried_at != self._version:
                self._serve(queue)
            return await waiter.result
        except asyncio.CancelledError:
            if waiter.result.done() and not waiter.result.cancelled() and waiter.result.exception() is None:
                self._release(waiter.result.result())  # placed in the moment in which the caller left
            raise
        finally:
            self._discard(waiter)

    def wake(self) -> None:
        """Workers came, went or changed their state: whoever may go, goes."""
        self._version += 1
        self._changed_at = self._version
        for queue in self._queues.values():
            self._serve(queue)

    def wake_for_room(self) -> None:
        """There may be room where there was none."""
        self._version += 1
        for queue in self._queues.values():
            if queue.waiters:
                self._serve(queue)

    def tick(self) -> None:
        """Forgive those who waited for long, and refuse every waiter whose time is over."""
        now = self._clock.now()
        for queue in self._queues.values():
            queue.forget(now)
        for waiter in [waiter for queue in self._queues.values() for waiter in queue.waiters.values()]:
            if not waiter.is_forgiving and waiter.request.excluded_workers and now >= waiter.since + self._forgive_s:
                waiter.is_forgiving = True
                self._try(waiter)
            if not waiter.result.done() and now >= waiter.until and self._may_go(waiter):
                self._try(waiter)  # so that it is told what is lacking now
            if not waiter.result.done() and now >= waiter.until:
                self._refuse_late(waiter, now - waiter.since)

    def correct(self, request_of: tuple[str, str, int], cost: float) -> None:
        """(model, tenant, priority) was charged ``cost`` too little (too much, if it is negative)."""
        model, tenant, priority = request_of
        if model in self._queues:
            self._queues[model].tickets.charge(tenant, priority, cost)

    def cost_of(self, request: PlaceRequest) -> float:
        """What a placement is charged beforehand."""
        num_projected = min(request.max_new_tokens, self._projected_tokens)
        return request.num_prompt_tokens + GENERATED_WEIGHT * num_projected

    # -- coming -------------------------------------------------------------------------------------------------------

    def _charge(self, request: PlaceRequest) -> None:
        queue = self._queues.setdefault(request.model, _Queue(self._max_waiting))
        cost = self.cost_of(request)
        queue.tickets.charge(request.tenant, request.priority, cost)
        queue.rate.note(cost, self._clock.now())

    def _enter(self, queue: _Queue, request: PlaceRequest, lacking: Shortfall, *, is_tried: bool) -> _Waiter:
        now = self._clock.now()
        ticket = Ticket(
            tenant=request.tenant,
            priority=request.priority,
            since=now - request.age_s,
            cost=self.cost_of(request),
            was_served=request.attempt > 1,
        )
        waiter = _Waiter(request=request, ticket=ticket, since=now, shortfall=lacking)
        self._set_until(waiter)
        if lacking.lack is Lack.NO_ROOM and not ticket.was_served:
            self._check_wait(queue, waiter, now)
        try:
            displaced = queue.tickets.enter(ticket)
        except Full as full:
            raise self._full(queue, waiter, full, now) from None
        if displaced is not None:
            self._refuse_displaced(queue, queue.waiters[displaced], by=ticket)
        waiter.tried_at = self._version if is_tried else 0
        queue.waiters[ticket] = waiter
        queue.note_waiting(ticket, now)
        return waiter

    def _set_until(self, waiter: _Waiter) -> None:
        """A request that was placed before may wait for room as long as for a worker: its answer has begun."""
        is_short = waiter.lacks_room and not waiter.ticket.was_served
        limit_s = self._max_wait_s if is_short else self._placement_wait_s
        waiter.until = waiter.since + min(limit_s, max(0.0, waiter.request.deadline_s - REPLY_MARGIN_S))

    def _check_wait(self, queue: _Queue, waiter: _Waiter, now: float) -> None:
        """Raises Overloaded for a request that could only wait for its refusal."""
        request, predicted = waiter.request, queue.predict(waiter.ticket, now)
        if predicted is None:
            return
        wait_s, work, rate = predicted
        may_wait_s = waiter.until - now
        may_last_s = max(0.0, request.deadline_s - REPLY_MARGIN_S)
        if wait_s <= CONFIDENCE * may_wait_s and wait_s + waiter.shortfall.ttft_s <= may_last_s:
            return
        self._on_refusal(request, Refusal.TOO_LATE)
        limit = f"it may wait {may_wait_s:.1f} s"
        if wait_s <= CONFIDENCE * may_wait_s:
            limit = f"with {waiter.shortfall.ttft_s:.1f} s to its first token it would miss its deadline"
        raise Overloaded(
            f"{waiter.shortfall.message}; it would wait {wait_s:.1f} s ({work:.0f} tokens are ahead, {rate:.0f} a "
            f"second are served), and {limit}",
            retry_after_s=max(wait_s - CONFIDENCE * may_wait_s, wait_s + waiter.shortfall.ttft_s - may_last_s, 1.0),
        )

    def _full(self, queue: _Queue, waiter: _Waiter, full: Full, now: float) -> ServingError:
        lacks_room = waiter.lacks_room
        message = f"{waiter.shortfall.message}, and {len(queue.waiters)} requests wait already"
        self._on_refusal(waiter.request, Refusal.TENANT_SHARE if full.is_tenants_doing else Refusal.QUEUE_FULL)
        if full.is_tenants_doing:
            message += ", none of another tenant more than of this one"
        kind = TooManyWaiting if lacks_room else QueueFull
        return kind(f"{message}; try again later", retry_after_s=self._time_to_shrink(queue, now))

    def _time_to_shrink(self, queue: _Queue, now: float) -> float | None:
        """Until half of what waits is served, as fast as it is served now."""
        rate = queue.rate.per_s(now)
        return sum(ticket.cost for ticket in queue.waiters) / 2 / rate if rate else None

    # -- going --------------------------------------------------------------------------------------------------------

    def _serve(self, queue: _Queue) -> None:
        """Place whoever may go now, the next one first."""
        while self._serve_one(queue):
            pass

    def _may_go(self, waiter: _Waiter) -> bool:
        """Whether its shortfall may be over. Who lacks a worker is helped by another cell only; but the cell may have
        changed when its turn did not come, so what counts is whether it has been tried since."""
        if waiter.lacks_room:
            return waiter.tried_at != self._version
        return waiter.tried_at < self._changed_at

    def _serve_one(self, queue: _Queue) -> bool:
        blocked: list[_Waiter] = []
        for waiter in list(queue.in_turn()):
            if waiter.result.done():
                continue  # the caller left; its coroutine has not run yet
            if self._may_go(waiter):
                self._try(waiter)
                if waiter.result.done():
                    for each in blocked:
                        each.num_overtaken += 1
                    return True
            if waiter.lacks_room:
                blocked.append(waiter)
                if len(blocked) >= MAX_TRIES or waiter.num_overtaken >= MAX_OVERTAKEN:
                    return False
        return False

    def _try(self, waiter: _Waiter) -> None:
        """Settles it if it can be placed, or never will be."""
        if waiter.result.done():
            return
        waiter.tried_at = self._version
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
        self._set_until(waiter)
        if outcome.lack is Lack.TOO_LONG:
            self._settle(waiter, ContextTooLong(outcome.message))

    def _refuse_late(self, waiter: _Waiter, waited_s: float) -> None:
        if not waiter.lacks_room:
            self._on_refusal(waiter.request, Refusal.NO_WORKER)
            self._settle(waiter, NoWorker(f"{waiter.shortfall.message}; none came within {waited_s:.1f} s"))
            return
        self._on_refusal(waiter.request, Refusal.WAITED_OUT)
        queue = self._queues[waiter.request.model]
        retry_after_s = self._time_to_shrink(queue, self._clock.now())
        message = f"{waiter.shortfall.message}; it has waited {waited_s:.1f} s"
        self._settle(waiter, Overloaded(message, retry_after_s=retry_after_s))

    def _refuse_displaced(self, queue: _Queue, waiter: _Waiter, *, by: Ticket) -> None:
        self._on_refusal(waiter.request, Refusal.DISPLACED)
        of_higher = by.priority_class is not waiter.ticket.priority_class
        whose = "of a higher priority class" if of_higher else "of a tenant with fewer of them"
        error = TooManyWaiting(
            f"{waiter.shortfall.message}, {len(queue.waiters)} requests wait, and one {whose} has taken the place",
            retry_after_s=self._time_to_shrink(queue, self._clock.now()),
        )
        self._settle(waiter, error)

    def _settle(self, waiter: _Waiter, outcome: Placement | ServingError) -> None:
        if isinstance(outcome, Placement):
            self._note_served(waiter)
        self._discard(waiter)
        if isinstance(outcome, Placement):
            waiter.result.set_result(outcome)
        else:
            waiter.result.set_exception(outcome)

    def _note_served(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.request.model]
        del queue.waiters[waiter.ticket]
        queue.tickets.serve(waiter.ticket)
        queue.note_served(waiter.ticket, self._clock.now())
        queue.note_waiting(waiter.ticket, self._clock.now())

    def _discard(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.request.model]
        if queue.waiters.pop(waiter.ticket, None) is not None:
            if waiter.ticket in queue.tickets:  # not if it was displaced
                queue.tickets.leave(waiter.ticket)
            queue.note_waiting(waiter.ticket, self._clock.now())
