"""The decode role (and unified pools): admits, fetches or prefills locally, runs, streams tokens.

The life of an admission is drawn in intake.py, the token stream in outbox.py. Everything here runs on the event loop;
the engine is reached through the step thread only.
"""

import asyncio
import logging
import time
from bisect import bisect, insort
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from core.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfBlocks,
    QueueFull,
    ServingError,
    StaleIncarnation,
    WorkerDraining,
    WorkerLost,
)
from core.handoff import PairCheck, PeerInfo
from core.ids import GatewayId, Incarnation, RequestId, WorkerId, format_incarnation
from core.tasks import TaskScope
from core.types import (
    AbortReply,
    AbortRequest,
    AdmitReply,
    AdmitRequest,
    AdmitVerdict,
    AttemptAccepted,
    AttemptFailed,
    FirstToken,
    Mode,
    Role,
    StepOutputs,
    TokenChunk,
    WorkerAddress,
    WorkerLoad,
)
from decode_worker.holders import Dial, Holders
from decode_worker.intake import Admission, AdmissionState, AttemptKey, Intake
from decode_worker.outbox import Outbox
from decode_worker.story import tell_life
from engine.engine import SequenceOutput, StepResult
from engine.sequence import Sequence
from kvtransfer.transfer_thread import TransferThread
from rpc.clients import HandoffClient
from rpc.server import RpcServer
from worker.choices import discard, fork_and_go_on, num_blocks_apart, start
from worker.context import Tombstones, WorkerContext

log = logging.getLogger(__name__)


class DecodeRole:
    """See worker/context.py for the contract of a role, proto/decode.proto for that of the calls."""

    def __init__(
        self, context: WorkerContext, transfers: TransferThread, me: PeerInfo, *, dial: Dial | None = None
    ) -> None:
        self._context = context
        self._transfers = transfers
        dial = dial or partial(HandoffClient, credentials=context.credentials)
        self._holders = Holders(context, transfers, me, dial=dial)
        self._intake = Intake(context, transfers, self._holders)
        self._admissions: dict[AttemptKey, Admission] = {}
        self._queue: list[Admission] = []
        self._has_priorities = context.pool_config.policy == "priority"
        self._num_arrivals = 0
        self._outboxes: dict[Incarnation, Outbox] = {}
        self._tombstones = Tombstones(context.clock, 2 * context.config.transfer.lease_s)
        self._scope = TaskScope("decode")
        self._endings: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    # -- role ---------------------------------------------------------------------------------------------------------

    def add_services(self, server: RpcServer) -> None:
        server.add_decode(self)

    async def start(self) -> None:
        """Nothing to start: every task belongs to an admission or a holder."""

    def meet(self, peers: tuple[WorkerAddress, ...]) -> None:
        self._holders.meet(peers)

    def fill_load(self, load: WorkerLoad) -> WorkerLoad:
        self._serve_queue()  # blocks also come back when a transfer becomes quiet, which wakes nobody
        stats = self._transfers.stats()
        queued = [admission for admission in self._admissions.values() if admission.state is not AdmissionState.RUNNING]
        return replace(
            load,
            num_waiting=load.num_waiting + len(queued),
            queued_prompt_tokens=load.queued_prompt_tokens
            + sum(a.num_tokens for a in queued if a.asked.mode is Mode.LOCAL),
            num_transfers=stats.num_active,
            kv_bytes_received=stats.bytes_received,
            broken_pairs=self._context.pairs.broken(),
        )

    def begin_drain(self) -> None:
        """Whoever waits for room has nothing here: another worker may have room now."""
        draining = WorkerDraining(f"{self._context.worker_id} is draining", worker_id=self._context.worker_id)
        if self._queue:
            self._scope.spawn(self._end_all(list(self._queue), draining), name="drain-queue")

    def is_idle(self) -> bool:
        return not self._admissions and self._transfers.stats().num_active == 0

    async def stop(self) -> None:
        self._is_stopping = True
        stopped = WorkerDraining("the decode worker is stopping", worker_id=self._context.worker_id)
        await self._end_all(list(self._admissions.values()), stopped)
        if self._endings:
            await asyncio.wait(self._endings)  # of those that were ending already: their room is given back too
        for outbox in self._outboxes.values():
            outbox.close()
        await self._scope.close()
        await self._holders.close()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def admit(self, request: AdmitRequest) -> AdmitReply:
        """Reserve blocks now (accepted), or take a place in the queue. Refusals leave nothing behind."""
        context, asked = self._context, request.request
        context.check(asked, request.worker_incarnation)
        grammar = await context.compile_grammar(asked.sampling)
        await context.failpoints.reach("decode.admit", asked.request_id)
        context.check_serving()  # a drain that began meanwhile may be over
        if asked.gateway_incarnation not in self._outboxes:
            raise WorkerLost("the gateway has no outputs stream here", worker_id=context.worker_id)
        if request.mode is Mode.SPLIT and (request.prefill is None or context.role is Role.UNIFIED):
            raise InvalidRequest("a split placement names a prefill worker, and a unified worker takes none")
        admission = self._make_admission(request)
        admission.grammar = grammar
        if (asked.request_id, asked.attempt) in self._tombstones:
            raise Cancelled("the attempt was aborted before it arrived")
        if admission.key in self._admissions:
            raise Cancelled("the attempt is here already")
        num_ahead = bisect(self._queue, admission.rank, key=_rank)
        if num_ahead or not self._try_reserve(admission):
            if len(self._queue) >= context.pool_config.max_queue:
                raise QueueFull(f"{context.worker_id} has {len(self._queue)} requests waiting for KV blocks")
            insort(self._queue, admission, key=_rank)
        admission.enter(AdmissionState.QUEUED)
        admission.span = context.telemetry.begin(
            "decode",
            parent=asked.traceparent,
            kind="server",
            mode=str(request.mode),
            attempt=asked.attempt,
            worker=context.worker_id,
            incarnation=format_incarnation(context.incarnation),
        )
        self._admissions[admission.key] = admission
        admission.task = self._scope.spawn(self._run(admission), name=f"admission-{asked.request_id[:8]}")
        admission.task.add_done_callback(partial(self._on_run_end, admission))
        if admission.reservation is not None:
            return AdmitReply(verdict=AdmitVerdict.ACCEPTED)
        return AdmitReply(verdict=AdmitVerdict.QUEUED, num_ahead=num_ahead)

    async def abort_decode(self, request: AbortRequest) -> AbortReply:
        wanted = [
            admission
            for key, admission in self._admissions.items()
            if key.request_id == request.request_id and request.attempt in (0, key.attempt)
        ]
        if request.choices:
            for admission in wanted:
                admission.unread.update(request.choices)
            return AbortReply(found=bool(wanted))
        self._tombstones.add(request.request_id, request.attempt)
        for admission in wanted:
            admission.is_resumed = request.is_resumed
        await self._end_all(wanted, None)
        return AbortReply(found=bool(wanted), num_custody_blocks=self._context.engine.pool.counts().custody)

    async def outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, worker_incarnation: Incarnation
    ) -> AsyncGenerator[StepOutputs, None]:
        context = self._context
        if worker_incarnation != context.incarnation:
            raise StaleIncarnation(f"{context.worker_id} was restarted", worker_id=context.worker_id)
        if self._is_stopping:
            raise WorkerDraining(f"{context.worker_id} is stopping", worker_id=context.worker_id)
        outbox = Outbox(gateway_id, gateway_incarnation)
        replaced = self._outboxes.get(gateway_incarnation)
        self._outboxes[gateway_incarnation] = outbox
        if replaced is not None:
            replaced.close()
            await self._lose_gateway(replaced)
        try:
            async for message in outbox.messages():
                yield message
        finally:
            if self._outboxes.get(gateway_incarnation) is outbox:
                del self._outboxes[gateway_incarnation]
                if not self._is_stopping:
                    self._scope.spawn(self._lose_gateway(outbox), name="gateway-lost")

    async def check_pair(self, prefill: WorkerAddress, worker_incarnation: Incarnation) -> PairCheck:
        """For operators, on a live pair. Raises the typed error of a holder that cannot be reached."""
        context = self._context
        if worker_incarnation != context.incarnation:
            raise StaleIncarnation(f"{context.worker_id} was restarted", worker_id=context.worker_id)
        if context.role is Role.UNIFIED:
            raise InvalidRequest(f"{context.worker_id} is a unified worker: it takes no hand-offs")
        report = await self._holders.check(prefill)
        circuit = context.pairs.circuit(prefill.worker_id, prefill.incarnation)
        return PairCheck(
            prefill=prefill.worker_id,
            decode=context.worker_id,
            circuit=circuit.state,
            circuit_why=circuit.why,
            reason=report.reason,
            links=report.measures(),
        )

    # -- one admission ------------------------------------------------------------------------------------------------

    def _make_admission(self, request: AdmitRequest) -> Admission:
        context, asked = self._context, request.request
        num_tokens = asked.num_prompt_tokens + len(asked.choices[0].accepted)
        limits = context.engine.limits
        if num_tokens >= limits.max_context:
            raise ContextTooLong(f"{num_tokens} tokens do not fit a context of {limits.max_context}", param="prompt")
        left = min(asked.sampling.max_tokens - len(asked.choices[0].accepted), limits.max_context - num_tokens)
        num_final = num_tokens + max(1, min(left, context.config.worker.projected_tokens))
        num_others, block_size = len(asked.choices) - 1, context.geometry.block_size
        needed = context.geometry.blocks_for(num_tokens + 1)
        needed += num_others * num_blocks_apart(num_tokens, num_tokens + 1, block_size)
        num_apart = num_blocks_apart(num_tokens, num_final, block_size)
        wanted = context.geometry.blocks_for(num_final) + num_others * num_apart
        if needed > limits.num_blocks:
            raise ContextTooLong(
                f"the prompt and {num_others + 1} choices need {needed} KV blocks, {context.worker_id} has "
                f"{limits.num_blocks}; raise kv.memory_bytes or shorten the prompt",
                param="prompt",
            )
        self._num_arrivals += 1
        return Admission(
            asked=request,
            rank=(
                asked.priority if self._has_priorities else 0,
                context.clock.now() - asked.age_s,
                self._num_arrivals,
            ),
            gateway=asked.gateway_incarnation,
            deadline_at=context.clock.now() + asked.deadline_s,
            num_blocks=min(wanted, limits.num_blocks),
            num_blocks_apart=num_apart,
        )

    async def _run(self, admission: Admission) -> None:
        """From the queue to a running sequence; every failure becomes one typed message to the gateway."""
        context, asked = self._context, admission.asked
        error: ServingError
        try:
            async with asyncio.timeout(asked.request.deadline_s):
                if admission.reservation is None:
                    await admission.room.wait()
                    self._tell(admission, accepted=True)
                admission.enter(AdmissionState.RESERVED)
                await context.failpoints.reach("decode.reserved", asked.request.request_id)
                firsts: tuple[FirstToken, ...] = ()
                if asked.mode is Mode.LOCAL:
                    admission.sequences = self._intake.make_local(admission)
                else:
                    admission.sequences, firsts = await self._intake.fetch(admission)
                admission.unfinished = {sequence.key.choice for sequence in admission.sequences}
                await context.failpoints.reach("decode.start", asked.request.request_id)
                admission.enter(AdmissionState.RUNNING)
                if admission.fetch is not None and asked.prefill is not None:
                    context.samples.add_handoff(asked.prefill, *admission.exposed_transfer())
                    context.observed.transfer(admission.transfer_s, admission.fetch.num_bytes)
                for number, first in enumerate(firsts):
                    self._send_first(admission, first, is_leader=number == 0)
                leader, *others = admission.sequences
                arrived = () if asked.mode is Mode.LOCAL else others
                await context.steps.call(partial(start, leader=leader, others=arrived))
                await asyncio.Event().wait()  # ends by cancellation (finished, aborted) or by the deadline
            return
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed at the decode worker")
        except ServingError as failure:
            error = failure
        admission.task = None  # this task: it must not cancel itself below
        await self._end(admission, error)

    def _on_run_end(self, admission: Admission, task: "asyncio.Task[None]") -> None:
        """A task that died by a mistake of ours (its scope logs it) takes no room with it, and the gateway is told."""
        if self._admissions.get(admission.key) is admission and not self._is_stopping:
            admission.task = None
            self._scope.spawn(self._end(admission, InternalError("the decode worker failed the request")), name="died")

    async def _end(self, admission: Admission, error: ServingError | None) -> None:
        """The one way out that is not a finish. Runs to its end even if the caller (an abort call) is cancelled."""
        if self._admissions.get(admission.key) is admission:
            del self._admissions[admission.key]
            admission.state = AdmissionState.OVER
            self._tell_life(admission)
            outcome = Cancelled.slug if error is None else error.slug
            self._context.attempts_ended[outcome] += 1
            admission.span.end(outcome)
            ending = self._scope.spawn(self._give_back(admission, error), name="give-back")
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)

    async def _end_all(self, admissions: Iterable[Admission], error: ServingError | None) -> None:
        """At once: each waits for the running step, all of them for the same one."""
        await asyncio.gather(*[self._end(admission, error) for admission in admissions])

    async def _give_back(self, admission: Admission, error: ServingError | None) -> None:
        """Everything is given back, then the gateway is told (if it must be)."""
        if admission in self._queue:
            self._queue.remove(admission)
        admission.is_resumed = admission.is_resumed or error is not None
        if admission.task is not None:
            admission.task.cancel()
            await asyncio.wait({admission.task})
        if admission.sequences:
            with suppress(WorkerLost):  # the engine has ended, and its blocks with it
                await self._context.steps.call(lambda engine: discard(engine, admission.sequences))
        if admission.reservation is not None:
            admission.reservation.release()
            admission.reservation = None
        outbox = self._outboxes.get(admission.gateway)
        if outbox is not None:
            outbox.drop(admission.key.request_id, admission.key.attempt)
        if error is not None:
            self._tell(admission, error=error)
        self._serve_queue()

    def on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        for output in result.outputs:
            key = output.sequence.key
            admission = self._admissions.get(AttemptKey(key.request_id, key.attempt))
            if admission is not None:
                self._take(admission, output, ended_at)
        self._serve_queue()

    def _take(self, admission: Admission, output: SequenceOutput, ended_at: float) -> None:
        is_first_local = False
        if "first_token" not in admission.marks:
            admission.marks["first_token"] = ended_at
            is_first_local = admission.asked.mode is Mode.LOCAL
        if output.error is not None:
            self._scope.spawn(self._end(admission, output.error), name="sequence-failed")
            return
        choice = output.sequence.key.choice
        if choice not in admission.unfinished:
            return  # a step that ran before the sequence was off the engine
        outbox = self._outboxes.get(admission.gateway)
        is_over = output.finish_reason is not None
        if choice in admission.unread and not output.sequence.is_kept:
            outbox, is_over = None, True
            self._scope.spawn(self._stop_choice(output.sequence), name="choice-unread")
        if is_over:
            self._context.failpoints.hit("decode.finishing", admission.key.request_id)
        if output.sequence.is_kept:
            self._scope.spawn(self._fork(admission, is_over=is_over), name="fork")
        stream_key = admission.asked.stream_key
        has_more = is_over or is_first_local or output.logprobs or output.prompt_logprobs
        if outbox is not None and stream_key and not has_more:
            name = (admission.key.request_id, admission.key.attempt, choice)
            outbox.put_token(stream_key + choice, name, output.index, output.token_id, stepped_at=ended_at)
        elif outbox is not None:
            outbox.put_chunk(
                TokenChunk(
                    request_id=admission.key.request_id,
                    choice=choice,
                    attempt=admission.key.attempt,
                    first_index=output.index,
                    token_ids=(output.token_id,),
                    logprobs=() if output.logprobs is None else (output.logprobs,),
                    prompt_logprobs=output.prompt_logprobs,
                    finish_reason=output.finish_reason,
                    stop_token_id=output.stop_token_id,
                    stages=admission.stages(ended_at, choice) if is_over or is_first_local else None,
                ),
                stepped_at=ended_at,
            )
        if is_over:
            admission.unfinished.discard(choice)
        if not admission.unfinished:
            del self._admissions[admission.key]
            admission.state = AdmissionState.OVER
            self._context.attempts_ended["ok"] += 1
            self._tell_life(admission)
            admission.span.end(choices=len(admission.choices))
            if admission.task is not None:
                admission.task.cancel()

    def _tell_life(self, admission: Admission) -> None:
        if admission.span.is_told:
            num_tokens = sum(len(sequence.tokens) - admission.num_tokens for sequence in admission.sequences)
            tell_life(self._context.telemetry, admission.span, admission.life(), num_tokens=max(0, num_tokens))

    async def _stop_choice(self, sequence: Sequence) -> None:
        with suppress(WorkerLost):  # the engine has ended, and its blocks with it
            await self._context.steps.call(lambda engine: discard(engine, [sequence]))

    async def _fork(self, admission: Admission, *, is_over: bool) -> None:
        """The prompt is computed here, and the first choice has paused behind its first token: the others follow. An
        admission that is over by then has nothing in the engine any more."""
        leader, *others = admission.sequences
        try:
            await self._context.steps.call(partial(fork_and_go_on, leader=leader, others=others, is_over=is_over))
        except ServingError as error:
            await self._end(admission, error)

    def _send_first(self, admission: Admission, first: FirstToken, *, is_leader: bool) -> None:
        """D repeats the first tokens, those that end their choice too: after its commit P's death is no error. The
        first tells how the KV came, whatever becomes of the request."""
        outbox = self._outboxes.get(admission.gateway)
        if outbox is not None:
            key, now = admission.key, time.monotonic()
            outbox.put_chunk(
                TokenChunk(
                    request_id=key.request_id,
                    choice=first.choice,
                    attempt=key.attempt,
                    first_index=first.index,
                    token_ids=(first.token_id,),
                    logprobs=() if first.logprobs is None else (first.logprobs,),
                    finish_reason=first.finish_reason,
                    stop_token_id=first.stop_token_id,
                    stages=admission.stages(now, first.choice) if is_leader or first.finish_reason else None,
                ),
                stepped_at=now,
            )

    def _tell(self, admission: Admission, *, accepted: bool = False, error: ServingError | None = None) -> None:
        outbox = self._outboxes.get(admission.gateway)
        if outbox is None:
            return
        key = admission.key
        if accepted:
            outbox.put_accepted(AttemptAccepted(request_id=key.request_id, attempt=key.attempt))
        if error is not None:
            outbox.put_failed(
                AttemptFailed(
                    request_id=key.request_id,
                    attempt=key.attempt,
                    slug=error.slug,
                    message=error.message,
                    worker_id=WorkerId(error.worker_id) if error.worker_id else None,
                )
            )

    # -- room ---------------------------------------------------------------------------------------------------------

    def _try_reserve(self, admission: Admission) -> bool:
        """Promise an admission its room. What running sequences are projected to grow by is not given away: they would
        be preempted for it."""
        if admission.reservation is None:
            engine = self._context.engine
            growth = engine.num_growth_blocks
            if growth and engine.pool.num_unpromised < admission.num_blocks + growth:
                return False
            try:
                admission.reservation = engine.pool.reserve(admission.num_blocks)
            except OutOfBlocks:
                return False
        return True

    def _serve_queue(self) -> None:
        """In order of rank: the head waits for its room, nobody overtakes it."""
        while self._queue and self._try_reserve(self._queue[0]):
            self._queue.pop(0).room.set()

    async def _lose_gateway(self, outbox: Outbox) -> None:
        """A gateway's stream ended: nobody reads its answers, so they are not computed."""
        lost = [a for a in self._admissions.values() if a.gateway == outbox.incarnation]
        if lost:
            log.warning("gateway lost", extra={"gateway_id": outbox.gateway_id, "requests": len(lost)})
        for admission in lost:
            self._tombstones.add(RequestId(admission.key.request_id), admission.key.attempt)
        await self._end_all(lost, None)


def _rank(admission: Admission) -> tuple[int, float, int]:
    return admission.rank
