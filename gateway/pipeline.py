"""The story of a request: place it, read the prompt at P while D makes room, stream D's tokens, retry what fails.

    placing --placed--> running --finish--> done
       ^                   |  \\--RequestError, DeadlineExceeded, no attempt left--> failed
       '---re-placed-------'            (in every state: cancelled; both legs are aborted)

Every request ends in one finish reason or one typed error, before its deadline. Tokens are *accepted* once, in order,
by index; an accepted token is never taken back, so a retry continues behind it (design.md 3). Several choices share an
attempt until one fails; those that have come apart by then are retried beside each other. `recovery` is read here and
nowhere else.
"""

import asyncio
import logging
from dataclasses import dataclass, replace

from core import types as t
from core.errors import (
    Blame,
    Cancelled,
    InternalError,
    NoWorker,
    OutOfBlocks,
    Recovery,
    ServingError,
    WorkerDraining,
    WorkerLost,
)
from core.ids import WorkerId
from core.tasks import all_or_none
from gateway.attempt import Attempt
from gateway.ends import Ends
from gateway.legs import Peers, open_legs
from gateway.ports import RouterPort
from gateway.run import Branch, Run

log = logging.getLogger(__name__)

ROUTER_PATIENCE_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    max_attempts: int
    capacity_patience_s: float
    """How long a request is placed again because workers refuse it for lack of room."""


class Pipeline:
    """Drives requests. One for each gateway process; `generate` may run many times at once."""

    def __init__(self, router: RouterPort, peers: Peers, limits: PipelineLimits) -> None:
        self._router = router
        self._peers = peers
        self._limits = limits
        self._ends = Ends(router, peers)

    async def generate(self, run: Run) -> None:
        """Returns when every choice has its finish reason; their sinks are told of tokens as they come. Raises one
        typed error if there is an end without one. Cancel it to cancel the request.
        """
        try:
            await self._drive(run, Branch(choices=run.choices))
            run.finish()
        except ServingError as error:
            run.end(error.slug)
            raise
        except asyncio.CancelledError:
            run.end(Cancelled.slug)
            raise
        finally:
            run.end(InternalError.slug)  # has no effect on a run that ended above

    async def _drive(self, run: Run, branch: Branch) -> None:
        """To the end of these choices; those that have come apart go on beside each other."""
        branches = [branch]
        try:
            while len(branches) == 1:
                branch, reason = branches[0], Cancelled.slug
                try:
                    if await self._attempt(run, branch):
                        reason = "finished"
                        return
                    pause_s = 0.0
                except ServingError as error:
                    reason = error.slug
                    pause_s = self._recover(run, branch, error)
                await asyncio.sleep(pause_s)
                branches = [branch] if branch.prefill is not None else branch.apart()
        finally:
            branch.end_prefill(reason)
        await all_or_none([self._drive(run, one) for one in branches])

    async def _attempt(self, run: Run, branch: Branch) -> bool:
        """False when what is held for these choices cannot be had any more, and they have come apart: nothing was
        begun."""
        number, since_s = run.begin_attempt(branch), run.stages.elapsed_s()
        num_before = branch.num_generated
        outcome, failure = Cancelled.slug, None
        branch.span = run.trace.attempt(number, len(branch.choices))
        try:
            placement = await self._place(run, branch, number)
            if branch.prefill is not None and not placement.is_held:
                branch.end_prefill("placed anew")
                if not branch.is_together:
                    return False
            async with open_legs(self._peers, Attempt(run, branch, number, placement)) as legs:
                await legs.over
            outcome = "ok"
            return True
        except ServingError as error:
            outcome, failure = error.slug, error
            run.trace.attempt_failed(branch.span)
            raise
        finally:
            branch.span.end(outcome, attempt=number)
            run.note_attempt(branch, number, since_s, outcome=outcome, error=failure)
            if branch.placement is not None:
                end = _end_of(run, branch.placement, number, outcome, failure)
                self._ends.add(replace(end, num_generated=branch.num_generated - num_before))

    async def _place(self, run: Run, branch: Branch, number: int) -> t.Placement:
        """A placement from the router, which may be restarting: its absence is borne for a while."""
        patience_ends_s = run.stages.elapsed_s() + ROUTER_PATIENCE_S
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                with run.trace.begin("route", branch.span, kind="client", attempt=number) as span:
                    placement = await self._ends.told_with(run.place_request(branch, number, span))
            except WorkerLost:
                if run.remaining_s() <= 0 or run.stages.elapsed_s() > patience_ends_s:
                    raise NoWorker("the router is not reachable; try again in a moment") from None
            else:
                run.begin(branch, placement)
                return placement
            await asyncio.sleep(min(backoff_s, max(run.remaining_s(), 0.0)))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _recover(self, run: Run, branch: Branch, error: ServingError) -> float:
        """Seconds to wait before the next attempt, or raises the error when there is none."""
        # A worker may cancel an attempt for reasons of its own (it lost us for a moment); our client did not.
        recovery = Recovery.REPLACE if isinstance(error, Cancelled) else error.recovery
        placement = branch.placement
        is_told = all(choice.finish_reason is not None for choice in branch.choices)  # only P's word is missing
        if placement is None or recovery is Recovery.NONE or run.remaining_s() <= 0 or is_told:
            raise error
        run.stages.mark(t.Stage.RETRY)
        log.info(
            "attempt failed",
            extra={
                "request_id": run.request.request_id,
                "choices": [choice.number for choice in branch.choices],
                "slug": error.slug,
                "worker": error.worker_id,
                "reason": error.message,
                "num_accepted": sum(len(choice.accepted) for choice in branch.choices),
            },
        )
        if not _is_held(branch, placement, error, recovery):
            branch.end_prefill(error.slug)
        if recovery is Recovery.LATER:
            branch.num_refused += 1
            if run.refused_for_s(branch) > self._limits.capacity_patience_s:
                raise error
            num_waits = branch.num_refused
        elif placement.is_held and error.blame is Blame.NONE:
            num_waits = 0  # what was held is gone: to ask for it was no attempt
        elif isinstance(error, WorkerDraining) and self._avoid(branch, placement, error):
            num_waits = 0  # nobody failed: it leaves because it was asked to, once, and was no attempt
        else:
            branch.num_failed += 1
            if branch.num_failed >= self._limits.max_attempts:
                raise error
            self._avoid(branch, placement, error)
            num_waits = branch.num_failed - 1
        backoff_s = 0.0 if num_waits == 0 else min(FIRST_BACKOFF_S * 2 ** min(num_waits - 1, 10), MAX_BACKOFF_S)
        return min(backoff_s, run.remaining_s())

    def _avoid(self, branch: Branch, placement: t.Placement, error: ServingError) -> bool:
        """Whether there is somebody to avoid from now on."""
        num_avoided = len(branch.excluded_pairs) + len(branch.excluded_workers)
        prefill, decode = placement.prefill, placement.decode
        if error.blame is Blame.PAIR and prefill is not None:
            branch.excluded_pairs.append((prefill.worker_id, prefill.incarnation, decode.worker_id, decode.incarnation))
        elif error.blame is not Blame.NONE:
            for worker in (prefill, decode):
                if worker is not None and worker.worker_id == error.worker_id:
                    branch.excluded_workers.append((worker.worker_id, worker.incarnation))
        return len(branch.excluded_pairs) + len(branch.excluded_workers) > num_avoided


def _end_of(run: Run, placement: t.Placement, number: int, outcome: str, error: ServingError | None) -> t.PlacementEnd:
    blamed = None if error is None or error.blame is Blame.NONE else error.worker_id
    return t.PlacementEnd(
        placement_id=placement.placement_id,
        request_id=run.request.request_id,
        attempt=number,
        outcome=outcome,
        blamed_worker=None if blamed is None else WorkerId(blamed),
    )


def _is_held(branch: Branch, placement: t.Placement, error: ServingError, recovery: Recovery) -> bool:
    """Whether another decode worker may fetch what P has: it was this one, or the way to it, that failed."""
    if branch.prefill is None or branch.prefill.held is None or isinstance(error, OutOfBlocks):
        return False  # no room: not to compute it, or not to hold it any longer
    is_decode_to_blame = error.blame is Blame.WORKER and error.worker_id == placement.decode.worker_id
    return recovery in (Recovery.REFETCH, Recovery.LATER) or is_decode_to_blame
