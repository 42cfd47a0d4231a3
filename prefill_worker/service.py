"""The prefill role: reads a prompt, samples the first token once, holds the KV for whoever decodes.

An attempt at P::

    ROOM --blocks for the whole prompt and quota--> COMPUTING --first tokens--> HELD (export.py) --> over
      |                                                 |            `--they end every choice--> over
      `--deadline | cancel | draining--> over           `--deadline | cancel | NaN--> over

ROOM is a line (the oldest first, or by priority); prompts whose reader has asked for them come first. Such a
reader has room for all of it, so what it asked for ends, and gives its blocks back. What nobody has asked for yet may
be held for as long as a decode worker has no room, and that room may be promised to a prompt that waits here: so an
awaited prompt that has waited for `_PATIENCE_S` ends what is not awaited, the youngest first, and no two requests can
wait for what the other one holds. COMPUTING is one sequence, which reads the prompt; with
several choices the others are forked from it for their first tokens (worker/choices.py). The call ends when the first
tokens are known; HELD outlives it under the lease.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from core.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    LeaseExpired,
    OutOfBlocks,
    QueueFull,
    ServingError,
    WorkerDraining,
    WorkerLost,
)
from core.handoff import PeerInfo, ToHolder, ToReader
from core.ids import HandoffId, RequestId, format_incarnation
from core.spans import Span
from core.tasks import TaskScope
from core.types import (
    AbortReply,
    AbortRequest,
    FirstToken,
    GenerateRequest,
    PrefillReply,
    PrefillRequest,
    StageTimes,
    WorkerAddress,
    WorkerLoad,
)
from engine.block_pool import Reservation
from engine.engine import Engine, SequenceOutput, StepResult
from engine.grammar import CompiledGrammar
from engine.sequence import Sequence, SequenceKey
from kvtransfer.lease import LeaseTable
from prefill_worker.export import Exports
from rpc.server import RpcServer
from worker.choices import discard, fork
from worker.context import Tombstones, WorkerContext
from worker.line import Line, Place

log = logging.getLogger(__name__)

_ROOM_RETRY_S = 0.05
_PATIENCE_S = 0.5
"""Of a prompt whose reader waits, with those that have none (yet: it may be on its way)."""
_ENDING_S = 5.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Attempt:
    handoff_id: HandoffId
    task: "asyncio.Task[PrefillReply] | None"
    num_tokens: int
    firsts: "dict[int, asyncio.Future[SequenceOutput]]"
    """By choice."""
    span: Span
    has_room: bool = False
    is_held: bool = False
    abort_error: ServingError | None = None


@dataclass(slots=True)
class _Patience:
    """Of the head of the line, from the moment at which it is known to have a reader."""

    since: float | None = None

    def is_over(self, has_reader: bool) -> bool:
        now = asyncio.get_running_loop().time()
        self.since = None if not has_reader else now if self.since is None else self.since
        return self.since is not None and now - self.since >= _PATIENCE_S


class PrefillRole:
    """See worker/context.py for the contract of a role, proto/prefill.proto for that of the calls."""

    def __init__(self, context: WorkerContext, leases: LeaseTable, me: PeerInfo) -> None:
        self._context = context
        self.exports = Exports(context, leases, me)
        self._leases = leases
        self._attempts: dict[tuple[RequestId, int], _Attempt] = {}
        self._tombstones = Tombstones(context.clock, 2 * context.config.transfer.lease_s)
        self._line = Line(context.pool_config)
        self._places: dict[Place, HandoffId] = {}
        self.exports.on_readers_changed = self._look_for_readers
        self._scope = TaskScope("prefill")
        self._reaping = TaskScope("prefill-leases", on_failure=context.on_broken)

    # -- role ---------------------------------------------------------------------------------------------------------

    def add_services(self, server: RpcServer) -> None:
        server.add_prefill(self)
        server.add_handoff(self)

    async def start(self) -> None:
        self._reaping.spawn(self.exports.reap(), name="lease-reaper")

    def meet(self, peers: tuple[WorkerAddress, ...]) -> None:
        """Nothing to do: decode workers dial, and say what they have read."""

    def on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        for sequence in result.preempted:
            self._end_preempted(sequence.key)
        for leased in result.leased:
            key = leased.sequence.key
            attempt = self._attempts.get((key.request_id, key.attempt))
            if attempt is None:
                self._context.engine.pool.end_lease(leased.blocks)
            else:
                self.exports.offer(attempt.handoff_id, leased.first_block, leased.blocks)
        for output in result.outputs:  # after the blocks: somebody waits for those of a last chunk
            key = output.sequence.key
            attempt = self._attempts.get((key.request_id, key.attempt))
            if attempt is not None and not attempt.firsts[key.choice].done():
                attempt.firsts[key.choice].set_result(output)
        self.exports.room_freed.set()

    def fill_load(self, load: WorkerLoad) -> WorkerLoad:
        stats = self._leases.stats()
        computing = [attempt for attempt in self._attempts.values() if not attempt.is_held]
        return replace(
            load,
            num_waiting=load.num_waiting + len(self._line),
            queued_prompt_tokens=sum(attempt.num_tokens for attempt in computing),
            num_leases=stats.num_live,
            held_bytes=stats.held_bytes,
            prompt_tokens_refetched=self.exports.refetched_tokens,
            kv_bytes_sent=((self._context.config.transfer.backend, self.exports.sent_bytes),),
        )

    def begin_drain(self) -> None:
        """Prompts that wait are read still: they are here, and their decode workers wait for them."""

    def is_idle(self) -> bool:
        return not self._attempts and self.exports.is_idle()

    async def stop(self) -> None:
        worker_id = self._context.worker_id
        for key in list(self._attempts):
            await self._abort(key, WorkerDraining(f"{worker_id} is stopping", worker_id=worker_id))
        await self.exports.close()
        await self._scope.join(_ENDING_S)  # what is being held or discarded gives its blocks back
        await self._scope.close()
        await self._reaping.close()

    def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]:
        return self.exports.connect(messages)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        context, asked = self._context, request.request
        context.check(asked, request.worker_incarnation)
        key = (asked.request_id, asked.attempt)
        if key in self._tombstones:
            raise Cancelled("the attempt was aborted before it arrived")
        if key in self._attempts:
            raise Cancelled("the attempt is here already")
        num_tokens = asked.num_prompt_tokens + len(asked.choices[0].accepted)
        self._check_size(num_tokens, num_choices=len(asked.choices))
        loop = asyncio.get_running_loop()
        attempt = _Attempt(
            handoff_id=request.handoff_id,
            task=asyncio.current_task(),
            num_tokens=num_tokens,
            firsts={progress.choice: loop.create_future() for progress in asked.choices},
            span=context.telemetry.begin(
                "prefill",
                parent=asked.traceparent,
                kind="server",
                attempt=asked.attempt,
                tokens=num_tokens,
                worker=context.worker_id,
                incarnation=format_incarnation(context.incarnation),
            ),
        )
        self._attempts[key] = attempt
        self.exports.expect(request.handoff_id)
        outcome = InternalError.slug
        try:
            async with asyncio.timeout(asked.deadline_s):
                with attempt.span:
                    reply = await self._run(request, attempt)
            outcome = "ok"
            return reply
        except TimeoutError:
            outcome = DeadlineExceeded.slug
            raise DeadlineExceeded("the deadline passed during prefill") from None
        except asyncio.CancelledError:
            outcome = Cancelled.slug if attempt.abort_error is None else attempt.abort_error.slug
            if attempt.abort_error is not None:
                raise attempt.abort_error from None
            raise
        except ServingError as error:
            outcome = error.slug
            raise
        finally:
            context.attempts_ended[outcome] += 1
            self._attempts.pop(key, None)
            self.exports.expect_no_more(request.handoff_id)

    async def abort_prefill(self, request: AbortRequest) -> AbortReply:
        self._tombstones.add(request.request_id, request.attempt)
        wanted = [key for key in self._attempts if key[0] == request.request_id and request.attempt in (0, key[1])]
        found = False
        for key in wanted:
            found |= await self._abort(key, Cancelled(request.reason))
        found |= self.exports.end_request(request.request_id, request.attempt, Cancelled(request.reason))
        return AbortReply(found=found)

    # -- one attempt --------------------------------------------------------------------------------------------------

    async def _run(self, request: PrefillRequest, attempt: _Attempt) -> PrefillReply:
        context, asked, handoff_id = self._context, request.request, request.handoff_id
        arrived_at = time.monotonic()
        await context.failpoints.reach("prefill.queued", asked.request_id)
        grammar = await context.compile_grammar(asked.sampling)
        reservations = await self._wait_for_room(request, attempt)
        attempt.has_room = True
        sequences = _sequences(asked, grammar, reservations)
        leader, *others = sequences
        leader.is_leased_early = context.config.transfer.early_reads
        added_at = time.monotonic()
        is_over = False
        try:
            await context.steps.call(lambda engine: engine.add(leader))
            await context.failpoints.reach("prefill.computing", asked.request_id)
            outputs = [await _first(attempt, leader)]
            if others:
                if not await context.steps.call(partial(fork, leader=leader, others=others)):
                    raise Cancelled("the attempt is over")
                await context.failpoints.reach("prefill.forked")
                outputs += [await _first(attempt, sequence) for sequence in others]
            firsts = tuple(map(_first_token, outputs))
            if any(first.finish_reason is None for first in firsts):
                is_over = True  # the sequences are off the engine by what follows
                await self._hold(handoff_id, attempt, sequences, firsts)
            else:
                is_over = not others  # a single one is off the engine already
                self.exports.end(handoff_id, Cancelled("the request ended at its first token"))
        finally:
            if not is_over:
                try:
                    await asyncio.shield(self._scope.spawn(self._discard(sequences), name="discard"))
                finally:
                    self.exports.end(handoff_id, Cancelled("the prefill ended without a first token"))
        sequence, output = leader, outputs[0]
        started_at = sequence.first_step_at or added_at
        self._tell(attempt, sequence, arrived_at, started_at)
        return PrefillReply(
            first_tokens=firsts,
            num_cached_tokens=sequence.num_cached,
            stages=StageTimes(
                prefill_queue_s=max(0.0, started_at - arrived_at),
                prefill_s=max(0.0, time.monotonic() - started_at),
                num_prompt_tokens_computed=sequence.num_prompt_computed,
                num_cached_tokens=sequence.num_cached,
            ),
            prompt_logprobs=output.prompt_logprobs,
        )

    def _tell(self, attempt: _Attempt, sequence: Sequence, arrived_at: float, started_at: float) -> None:
        """What became of the prompt, in spans of what was measured anyway."""
        telemetry, parent = self._context.telemetry, attempt.span.traceparent
        if attempt.span.is_told:
            telemetry.tell("prefill.queue", arrived_at, started_at, parent=parent)
            telemetry.tell(
                "prefill.compute",
                started_at,
                time.monotonic(),
                parent=parent,
                tokens=sequence.num_prompt_computed,
                cached_tokens=sequence.num_cached,
            )

    async def _hold(
        self, handoff_id: HandoffId, attempt: _Attempt, sequences: list[Sequence], firsts: tuple[FirstToken, ...]
    ) -> None:
        """Lease the blocks of the prompt and seal the hand-off. Cancelled half-way, it still runs to its end, and gives
        all back."""

        async def hold() -> None:
            blocks = list(sequences[0].block_table)
            self._context.engine.pool.lease(blocks)  # now: a step of others may run, and the sequence is paused
            attempt.is_held = True
            freeing = self._scope.spawn(self._free_paused(sequences), name=f"free-{handoff_id[:8]}")
            try:
                await self.exports.seal(handoff_id, blocks, firsts)
            finally:
                await asyncio.wait({freeing})

        holding = self._scope.spawn(hold(), name=f"hold-{handoff_id[:8]}")
        try:
            await asyncio.shield(holding)
        except BaseException:
            self.exports.end(handoff_id, Cancelled("ended while the hand-off was sealed"))
            raise

    async def _wait_for_room(self, request: PrefillRequest, attempt: _Attempt) -> list[Reservation]:
        """Blocks for the whole prompt and a lease within the quota; the head of the line waits, and only those overtake
        it whose reader has room for them.

        A reservation for each choice: the first computes the prompt, the others its last token again.
        """
        if len(self._line) >= self._context.pool_config.max_queue:
            raise QueueFull(f"{self._context.worker_id} has {len(self._line)} prompts waiting")
        num_blocks, num_others = self._context.geometry.blocks_for(attempt.num_tokens), len(attempt.firsts) - 1
        with self._stand_in_line(request) as place:
            patience = _Patience()
            while True:
                await self._line.first(place)
                self.exports.room_freed.clear()
                try:
                    reservation = self._context.engine.pool.reserve(num_blocks + num_others)
                except OutOfBlocks:
                    await self._room_freed(place, patience)
                    continue
                try:
                    self._begin_export(request, attempt)
                except OutOfBlocks:
                    reservation.release()
                    await self._room_freed(place, patience)
                    continue
                except BaseException:
                    reservation.release()
                    raise
                return [reservation, *(reservation.split(1) for _ in range(num_others))]

    @contextmanager
    def _stand_in_line(self, request: PrefillRequest) -> Iterator[Place]:
        asked = request.request
        with self._line.join(asked.priority, since=self._context.clock.now() - asked.age_s) as place:
            self._places[place] = request.handoff_id
            self._look_for_readers()
            try:
                yield place
            finally:
                del self._places[place]

    def _look_for_readers(self) -> None:
        """A reader has come or gone: who is awaited goes first."""
        for place, handoff_id in self._places.items():
            self._line.prefer(place, self.exports.is_awaited(handoff_id))
        self.exports.room_freed.set()

    def _begin_export(self, request: PrefillRequest, attempt: _Attempt) -> None:
        asked = request.request
        self.exports.begin(
            request.handoff_id,
            request_id=asked.request_id,
            attempt=asked.attempt,
            num_tokens=attempt.num_tokens,
            deadline_s=asked.deadline_s,
            tenant=asked.tenant,
            traceparent=attempt.span.traceparent,
        )

    async def _room_freed(self, place: Place, patience: "_Patience") -> None:
        if patience.is_over(place.is_preferred):
            self._end_unawaited()
        try:
            async with asyncio.timeout(_ROOM_RETRY_S):
                await self.exports.room_freed.wait()
        except TimeoutError:
            pass  # blocks may also come back without an event

    def _end_unawaited(self) -> None:
        """Make room for a prompt whose reader waits: the youngest that nobody has asked for gives its own back."""
        error = OutOfBlocks(f"{self._context.worker_id} needed the room for a prompt that a decode worker waits for")
        handoff_id = self.exports.end_unawaited(error)
        for attempt in self._attempts.values():
            if attempt.handoff_id == handoff_id:
                _fail(attempt, error)

    def _check_size(self, num_tokens: int, *, num_choices: int) -> None:
        limits, geometry = self._context.engine.limits, self._context.geometry
        if num_tokens >= limits.max_context:
            raise ContextTooLong(f"{num_tokens} tokens do not fit a context of {limits.max_context}", param="prompt")
        room = int(limits.num_blocks * self._context.config.transfer.held_fraction)
        room = min(room, limits.num_blocks - (num_choices - 1))
        if geometry.blocks_for(num_tokens) > room:
            raise ContextTooLong(
                f"the prompt needs {geometry.blocks_for(num_tokens)} KV blocks, "
                f"{self._context.worker_id} may hold {room}; "
                "raise kv.memory_bytes or shorten the prompt",
                param="prompt",
            )

    async def _free_paused(self, sequences: list[Sequence]) -> None:
        """Take paused sequences off the engine: their blocks are in use no more."""
        leader, *others = sequences

        def free(engine: Engine) -> None:
            engine.pool.free(engine.detach(leader.key).block_table)
            discard(engine, others)

        with suppress(WorkerLost):  # the engine has ended, and its blocks with it
            await self._context.steps.call(free)

    def _end_preempted(self, key: SequenceKey) -> None:
        """It starts over in other blocks: what was announced of the old ones is not to be read any more."""
        attempt = self._attempts.get((key.request_id, key.attempt))
        first = None if attempt is None else attempt.firsts[key.choice]
        if attempt is not None and first is not None and not first.done():
            error = LeaseExpired("the prompt was preempted while it was handed over")
            if self.exports.end_announced(attempt.handoff_id, error):
                first.set_exception(error)
                first.exception()  # taken here too: the call may end before it looks

    async def _discard(self, sequences: list[Sequence]) -> None:
        """Off the engine, blocks freed; legal in every state of the sequences."""
        with suppress(WorkerLost):  # the engine has ended, and its blocks with it
            await self._context.steps.call(lambda engine: discard(engine, sequences))

    async def _abort(self, key: tuple[RequestId, int], error: ServingError) -> bool:
        """Cancel the call of a running attempt and wait until its blocks are back."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.is_held or attempt.task is None:
            return False
        if not attempt.has_room or not _fail(attempt, error):
            attempt.abort_error = error
            attempt.task.cancel()
        await asyncio.gather(_ended(attempt.task), return_exceptions=True)
        return True


def _fail(attempt: _Attempt, error: ServingError) -> bool:
    """End a prompt under computation; its call gives its blocks back. False when there is nothing to compute any
    more."""
    waiting = [first for first in attempt.firsts.values() if not first.done()]
    for first in waiting:
        first.set_exception(error)
        first.exception()  # taken here too: the call may end before it looks
    return bool(waiting)


async def _ended(task: "asyncio.Task[PrefillReply]") -> None:
    """Wait for a task of somebody else's; its outcome is its owner's."""
    await asyncio.wait({task})


def _sequences(
    asked: GenerateRequest, grammar: CompiledGrammar | None, reservations: list[Reservation]
) -> list[Sequence]:
    """One for each choice. The first computes the prompt, the others have its last token to compute again."""
    tokens = [*asked.prompt_token_ids, *asked.choices[0].accepted]
    return [
        Sequence(
            key=SequenceKey(request_id=asked.request_id, attempt=asked.attempt, choice=progress.choice),
            tokens=list(tokens),
            num_prompt_tokens=asked.num_prompt_tokens,
            sampling=asked.sampling,
            pause_at=len(tokens) + 1,
            is_kept=number == 0 and len(reservations) > 1,
            num_computed=0 if number == 0 else len(tokens) - 1,
            reservation=reservation,
            priority=asked.priority,
            salt=asked.cache_salt,
            grammar=None if grammar is None else grammar.start(),
        )
        for number, (progress, reservation) in enumerate(zip(asked.choices, reservations, strict=True))
    ]


async def _first(attempt: _Attempt, sequence: Sequence) -> SequenceOutput:
    """The first token of a choice. Raises the error that ended it."""
    output = await attempt.firsts[sequence.key.choice]
    if output.error is not None:
        raise output.error
    return output


def _first_token(output: SequenceOutput) -> FirstToken:
    return FirstToken(
        choice=output.sequence.key.choice,
        index=output.index,
        token_id=output.token_id,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
    )
