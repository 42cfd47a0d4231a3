"""The two legs of one attempt, running in parallel and reporting into one mailbox.

    admit:    asked --> accepted --> settled (D ended the choice by itself)
    prefill:  drawn in prefill_leg.py; it may be that of an attempt before

An attempt that D did not settle is aborted there, whatever ended it; what is at P is ended by the branch.

Events are handled where they arrive, without a task in between: a token costs one call from the stream's reader to the
client's frame (docs/adr/0018-tokens-are-pushed.md). The deadline is an event like any other.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from core import types as t
from core.errors import Cancelled, DeadlineExceeded, ServingError
from core.ids import Incarnation, WorkerId
from core.tasks import TaskScope
from gateway.attempt import Attempt
from gateway.ports import ClientFactory, PrefillPort
from gateway.prefill_leg import PrefillLeg, abort, report
from gateway.token_streams import Event, TakeToken, TokenStreams

log = logging.getLogger(__name__)

MAX_PREFILL_CLIENTS = 256
FINISHED = "finished"


class Peers:
    """Clients to the workers, shared by all requests of this gateway."""

    def __init__(self, clients: ClientFactory, streams: TokenStreams) -> None:
        self.streams = streams
        self._clients = clients
        self._prefill: dict[tuple[WorkerId, Incarnation], PrefillPort] = {}
        self._scope = TaskScope("peers")
        self._tasks: set[asyncio.Task[None]] = set()

    def prefill(self, worker: t.WorkerAddress) -> PrefillPort:
        key = (worker.worker_id, worker.incarnation)
        client = self._prefill.get(key)
        if client is None:
            self._forget_predecessors(worker)
            client = self._prefill[key] = self._clients.prefill(worker)
        return client

    def _forget_predecessors(self, worker: t.WorkerAddress) -> None:
        old = [key for key in self._prefill if key[0] == worker.worker_id]
        if len(self._prefill) >= MAX_PREFILL_CLIENTS:
            old.append(next(iter(self._prefill)))
        for key in dict.fromkeys(old):
            self._scope.spawn(self._prefill.pop(key).close(), name=f"close-{key[0]}")

    def spawn(self, work: Coroutine[object, object, None], *, name: str) -> "asyncio.Task[None]":
        """Runs what must outlive a request (aborts, reports), owned here."""
        task = self._scope.spawn(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Lets the aborts and reports under way finish."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
            if pending:
                log.warning("aborts unfinished at stop", extra={"num_tasks": len(pending)})

    async def close(self) -> None:
        await self._scope.close()
        await self.streams.close()
        for client in self._prefill.values():
            await client.close()
        self._prefill.clear()


class Legs:
    """One attempt's calls. Use `open_legs`."""

    def __init__(self, peers: Peers, attempt: Attempt) -> None:
        self._peers = peers
        self._attempt = attempt
        self._placement = placement = attempt.placement
        request = attempt.run.request
        self._request_id = request.request_id
        self._told: set[int] = set()
        self._cancelled: Cancelled | None = None
        """D's word, while P's is awaited."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every choice has finished, or with the typed error that ended the attempt."""
        # Whoever waits may be cancelled first; then nobody asks.
        self.over.add_done_callback(lambda over: over.cancelled() or over.exception())
        self._scope = TaskScope(f"attempt-{self._request_id}-{attempt.number}")
        self._span = attempt.begin_span("decode", placement.decode)
        self._link = peers.streams.link(placement.decode)
        self._link.subscribe(self._request_id, attempt.number, self.handle)
        takers = [self._taker(number) for number in range(request.sampling.n)]
        self._stream_key = self._link.name(self._request_id, attempt.number, takers)
        admit = report(self._admit, placement.decode, attempt.run.remaining_s, self.handle)
        self._scope.spawn(admit, name="admit")
        self._prefill: PrefillLeg | None = None
        self._prefill = self._begin_prefill()  # may tell of a failure at once
        self._deadline = asyncio.get_running_loop().call_later(
            max(attempt.run.remaining_s(), 0.0), self.handle, DeadlineExceeded("the request's deadline has passed")
        )

    def _begin_prefill(self) -> PrefillLeg | None:
        """The call to P, or what is left of that of an attempt before: its KV is claimed."""
        placement, branch = self._placement, self._attempt.branch
        if placement.prefill is None:
            return None
        leg = branch.prefill
        if leg is None:
            client, span = (
                self._peers.prefill(placement.prefill),
                self._attempt.begin_span("prefill", placement.prefill),
            )
            leg = branch.prefill = PrefillLeg(
                client, self._peers.spawn, placement, partial(self._attempt.request, span), span
            )
        elif leg.reply is not None:
            self._attempt.go_on_from(leg.reply)
        leg.attach(self.handle)
        return leg

    def handle(self, event: Event) -> None:
        """Takes what happened next. Its failure, whatever it is, is this attempt's: the stream goes on for others."""
        if self.over.done():
            return
        if isinstance(event, Cancelled) and self._prefill is not None and not self._prefill.is_answered:
            # D says it after P: a request that ends at its first token is not handed off, and P's own word of that
            # token is on its way. It comes, or its call fails.
            self._cancelled = event
            return
        try:
            if isinstance(event, ServingError):
                raise event
            self._attempt.take(event)
        except Exception as error:
            self._fail(error)
            return
        self._look()
        if self._cancelled is not None and not self.over.done():
            self._fail(self._cancelled)

    def _taker(self, number: int) -> TakeToken:
        """Of the plain tokens of a choice: its lane, where it has one."""
        take = partial(self.handle_token, number)
        lane = self._attempt.lane(number)
        if lane is None:
            return take
        lane.slow = take
        return lane.take

    def handle_token(self, choice: int, index: int, token_id: int, now: float) -> None:
        """The same for a plain token."""
        if self.over.done():
            return
        try:
            has_ended = self._attempt.take_token(choice, index, token_id, now)
        except Exception as error:
            self._fail(error)
            return
        if has_ended:
            self._look()

    def _fail(self, error: Exception) -> None:
        self._attempt.close_lanes()
        self.over.set_exception(error)

    def _look(self) -> None:
        if self._attempt.is_over:
            self.over.set_result(None)
        elif self._attempt.unread:
            self._abort_unread()

    async def close(self, reason: str, *, has_failed: bool = False) -> None:
        """Ends the attempt: nothing is delivered any more, and unfinished work is aborted at D. ``has_failed``: another
        attempt follows, if one can."""
        self.over.cancel()
        self._attempt.close_lanes()
        self._span.end("ok" if reason == FINISHED else reason)
        self._deadline.cancel()
        self._link.unsubscribe(self._request_id, self._attempt.number)
        if self._prefill is not None:
            self._prefill.detach(is_taken=self._attempt.is_taken)
        if not self._attempt.is_settled_by_decode:
            is_resumed = has_failed and self._prefill is not None and self._prefill.held is not None
            request = t.AbortRequest(
                request_id=self._request_id, attempt=self._attempt.number, reason=reason, is_resumed=is_resumed
            )
            self._peers.spawn(abort(self._link.client.abort, request), name=f"abort-decode-{self._request_id}")
        elif self._prefill is not None:
            self._prefill.settle()
        await self._scope.close()

    def _abort_unread(self) -> None:
        """D need not write on a choice whose end was found in its text."""
        unread = self._attempt.unread - self._told
        if unread:
            self._told |= unread
            request = t.AbortRequest(
                request_id=self._request_id,
                attempt=self._attempt.number,
                reason="stop",
                choices=tuple(sorted(unread)),
            )
            self._peers.spawn(abort(self._link.client.abort, request), name=f"abort-choices-{self._request_id}")

    async def _admit(self) -> t.AdmitReply:
        await self._link.ready()
        return await self._link.client.admit(
            t.AdmitRequest(
                request=self._attempt.request(self._span),
                handoff_id=self._placement.handoff_id,
                mode=self._placement.mode,
                worker_incarnation=self._placement.decode.incarnation,
                prefill=self._placement.prefill,
                is_held=self._placement.is_held,
                ticket=self._placement.ticket,
                stream_key=self._stream_key,
            )
        )


@asynccontextmanager
async def open_legs(peers: Peers, attempt: Attempt) -> AsyncIterator[Legs]:
    """The legs of one attempt; leaving the block, however it happens, ends D's; P's is the branch's."""
    legs = Legs(peers, attempt)
    reason, has_failed = "cancelled", False
    try:
        yield legs
        reason = FINISHED
    except ServingError as error:
        reason, has_failed = error.slug, True
        raise
    finally:
        await legs.close(reason, has_failed=has_failed)
