"""The prompt's way at a prefill worker, and what is held there afterwards.

::

    asked --answered--> held --settle (a decode worker took all)--> over
      |  `--error--> failed      `--end--> over, aborted at the worker
      `--end--> over, aborted at the worker

It is made by one attempt and outlives it when the decode worker failed: the next attempt may fetch the same KV. It
belongs to its branch, which ends it in every state.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from core import types as t
from core.errors import Cancelled, DeadlineExceeded, InternalError, ServingError, WorkerLost
from core.spans import NO_SPAN, Span
from gateway.ports import PrefillPort
from gateway.token_streams import Event, Handler

log = logging.getLogger(__name__)

Abort = Callable[[t.AbortRequest], Coroutine[object, object, t.AbortReply]]


class Spawn(Protocol):
    """Runs what outlives the attempt that asked for it."""

    def __call__(self, work: Coroutine[object, object, None], *, name: str) -> "asyncio.Task[None]": ...


class PrefillLeg:
    """One call of Prefill and its hand-off."""

    def __init__(
        self,
        client: PrefillPort,
        spawn: Spawn,
        placement: t.Placement,
        make_request: Callable[[], t.GenerateRequest],
        span: Span = NO_SPAN,
    ) -> None:
        """``span`` ends with the call."""
        assert placement.prefill is not None
        # Kept for the abort: asked for again later, it would take the place of its successor's client.
        self._client = client
        self._spawn = spawn
        self._placement, self._make_request = placement, make_request
        self._asked = make_request()
        self._span = span
        self._handler: Handler = _ignore
        self._error: ServingError | None = None
        self._is_taken = self._is_over = False
        self.reply: t.PrefillReply | None = None
        call = report(self._call, placement.prefill, lambda: make_request().deadline_s, self._take)
        self._task = spawn(call, name=f"prefill-{self._asked.request_id}")

    @property
    def accepted(self) -> tuple[int, ...]:
        """The tokens that count as prompt in the hand-off."""
        return self._asked.choices[0].accepted

    @property
    def is_answered(self) -> bool:
        return self.reply is not None or self._error is not None

    @property
    def held(self) -> t.HeldHandoff | None:
        """What another decode worker may claim: it is computed, or will be."""
        holder = self._placement.prefill
        if self._is_over or self._is_taken or self._error is not None or holder is None:
            return None
        return t.HeldHandoff(handoff_id=self._placement.handoff_id, holder=holder)

    def attach(self, handler: Handler) -> None:
        """``handler`` hears of the end of the call; of a failure also when it was before."""
        self._handler = handler
        if self._error is not None:
            handler(self._error)

    def detach(self, *, is_taken: bool) -> None:
        """The attempt is over. ``is_taken``: its decode worker had the blocks, so they are held no more."""
        self._handler = _ignore
        self._is_taken = self._is_taken or is_taken

    def settle(self) -> None:
        """A decode worker has taken everything: there is nothing to end."""
        self._is_over = True

    def end(self, reason: str) -> None:
        """Nobody wants it any more: the call is cancelled, what is held is given back."""
        if not self._is_over:
            self._is_over = True
            self._span.end(Cancelled.slug)
            self._task.cancel()
            asked = self._asked
            request = t.AbortRequest(request_id=asked.request_id, attempt=asked.attempt, reason=reason)
            self._spawn(abort(self._client.abort, request), name=f"abort-prefill-{asked.request_id}")

    def _take(self, event: Event) -> None:
        if isinstance(event, t.PrefillReply):
            self.reply = event
            self._span.end()
        elif isinstance(event, ServingError):
            self._error = event
            self._span.fail(event)
        if not self._is_over:
            self._handler(event)

    async def _call(self) -> t.PrefillReply:
        placement = self._placement
        assert placement.prefill is not None
        return await self._client.prefill(
            t.PrefillRequest(
                request=self._make_request(),
                handoff_id=placement.handoff_id,
                worker_incarnation=placement.prefill.incarnation,
                decode=placement.decode,
            )
        )


async def report(
    call: Callable[[], Coroutine[object, object, t.AdmitReply | t.PrefillReply]],
    worker: t.WorkerAddress,
    remaining_s: Callable[[], float],
    handle: Handler,
) -> None:
    """One event, however the call ends: nobody waits for a call that is gone."""
    event: Event = InternalError("the call to a worker broke", worker_id=worker.worker_id)
    try:
        event = await call()
    except ServingError as error:
        if isinstance(error, DeadlineExceeded) and remaining_s() > 0:
            # The call's own limit, not the request's: a worker that does not answer is lost to this attempt.
            error = WorkerLost(error.message)
        if error.worker_id is None:
            error.worker_id = worker.worker_id
        event = error
    finally:
        handle(event)


async def abort(call: Abort, request: t.AbortRequest) -> None:
    try:
        await call(request)
    except ServingError as error:
        # The worker's own timers and the loss of our stream end the attempt there; nothing waits for this.
        log.debug("abort failed", extra={"request_id": request.request_id, "slug": error.slug})


def _ignore(event: Event) -> None:
    pass
