"""The fetching side: how an admitted request becomes a running sequence.

An admission at D::

    QUEUED --room--> RESERVED --local--------------------------------------------------> RUNNING --> over
                        `--split: Open--> OPENED --Sealed--> FETCHING --quiet, verified--> RUNNING
                                           |  ^
                                           '--' Ready: blocks move early (reading.py)
    any state --abort | deadline | typed failure--> over

QUEUED ends by room or by the deadline (the request's, which bounds every state here). OPENED also ends when the holder
is lost. FETCHING ends by the transfer thread's own limits. Whatever is over has given back its reservation at once;
blocks under transfer follow when their operations are terminal (custody).
"""

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.handoff import Claim, DigestKind, Grant, HandoffOutcome, Open, Sealed, TransferMode
from core.ids import Incarnation, RequestId, format_incarnation
from core.spans import NO_SPAN, Span
from core.types import AdmitRequest, FirstToken, Mode, StageTimes, TransferChunk
from decode_worker.holders import Holder, Holders
from decode_worker.reading import Reading
from decode_worker.story import Life, as_chunks
from engine.block_pool import Reservation
from engine.grammar import CompiledGrammar
from engine.sequence import Sequence, SequenceKey
from kvtransfer.backends.base import Link
from kvtransfer.fetch import FetchResult, outcome_of
from kvtransfer.transfer_thread import TransferThread
from worker.context import WorkerContext

log = logging.getLogger(__name__)


class AdmissionState(StrEnum):
    QUEUED = "queued"
    RESERVED = "reserved"
    OPENED = "opened"
    FETCHING = "fetching"
    RUNNING = "running"
    OVER = "over"


class AttemptKey(NamedTuple):
    request_id: RequestId
    attempt: int


@dataclass(slots=True, eq=False, kw_only=True)
class Admission:
    """One attempt of one request at this worker."""

    asked: AdmitRequest
    gateway: Incarnation
    deadline_at: float
    """On the clock of this worker."""
    rank: tuple[int, float, int]
    """Order of service: priority under that policy, then age (wherever it has waited before), then arrival."""
    num_blocks: int
    """To reserve: the prompt, the accepted tokens and a projected answer for each choice."""
    num_blocks_apart: int
    """Of those, for each choice but the first: the others share the prompt's blocks with it."""
    state: AdmissionState = AdmissionState.QUEUED
    reservation: Reservation | None = None
    room: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    sequences: list[Sequence] = field(default_factory=list)
    """One for each choice that runs here; the first leads the others."""
    unfinished: set[int] = field(default_factory=set)
    """Choices whose end was not told yet."""
    unread: set[int] = field(default_factory=set)
    """Choices that the gateway reads no more: their next token is their last."""
    grammar: CompiledGrammar | None = None
    span: Span = NO_SPAN
    """Of the attempt at this worker."""
    marks: dict[str, float] = field(default_factory=dict)
    """``time.monotonic`` of state changes: they become the stage times."""
    fetch: FetchResult | None = None
    reading: Reading | None = None
    """What knows how the blocks moved."""
    is_resumed: bool = False
    """It ends, and the request may go on elsewhere: what is held for it is left to another claim."""

    @property
    def key(self) -> AttemptKey:
        request = self.asked.request
        return AttemptKey(request_id=request.request_id, attempt=request.attempt)

    @property
    def choices(self) -> list[int]:
        return [progress.choice for progress in self.asked.request.choices]

    @property
    def num_tokens(self) -> int:
        """Tokens to have KV for before the first step here."""
        request = self.asked.request
        return request.num_prompt_tokens + len(request.choices[0].accepted)

    @property
    def tokens(self) -> list[int]:
        """Those tokens."""
        request = self.asked.request
        return [*request.prompt_token_ids, *request.choices[0].accepted]

    def enter(self, state: AdmissionState) -> None:
        self.state = state
        self.marks[state] = time.monotonic()

    def stages(self, ended_at: float, choice: int) -> StageTimes:
        """What this worker knows of the critical path of a choice, as durations. The prompt's tokens are counted with
        the first choice."""

        def between(start: str, end: str) -> float:
            return max(0.0, self.marks[end] - self.marks[start]) if start in self.marks and end in self.marks else 0.0

        sequence = next((each for each in self.sequences if each.key.choice == choice), None)
        first_step = ended_at if sequence is None or sequence.first_step_at is None else sequence.first_step_at
        running = self.marks.get(AdmissionState.RUNNING, first_step)
        queue_s, prefill_s, decode_from = max(0.0, first_step - running), 0.0, first_step
        is_local = self.asked.mode is Mode.LOCAL
        if is_local:  # until the first token this worker was the prefill worker
            decode_from = self.marks.get("first_token", ended_at)
            prefill_s = max(0.0, decode_from - first_step)
        wait_s, post_s, move_s, slot_s = self._split_fetch(between(AdmissionState.FETCHING, "arrived"))
        return StageTimes(
            prefill_queue_s=queue_s if is_local else 0.0,
            prefill_s=prefill_s,
            reservation_s=between(AdmissionState.QUEUED, AdmissionState.RESERVED),
            handoff_wait_s=between(AdmissionState.OPENED, AdmissionState.FETCHING),
            transfer_s=between(AdmissionState.FETCHING, AdmissionState.RUNNING),
            transfer_wait_s=wait_s,
            transfer_post_s=post_s,
            transfer_move_s=move_s,
            transfer_verify_s=slot_s + between("arrived", "verified"),
            transfer_publish_s=between("verified", AdmissionState.RUNNING),
            decode_queue_s=0.0 if is_local else queue_s,
            decode_s=max(0.0, ended_at - decode_from),
            transfer_bytes=0 if self.fetch is None else self.fetch.num_bytes,
            transfer_early_bytes=0 if self.fetch is None else self.fetch.early_bytes,
            transfer_backend="" if self.fetch is None else self.fetch.backend,
            transfer_mode="" if self.fetch is None else str(self.fetch.mode),
            transfer_chunks=self._chunks(),
            num_prompt_tokens_computed=0 if sequence is None else sequence.num_prompt_computed,
            num_cached_tokens=sequence.num_cached if sequence is not None and is_local else 0,
        )

    def _chunks(self) -> tuple[TransferChunk, ...]:
        if self.reading is None:
            return ()
        request = self.asked.request
        received_at = self.marks[AdmissionState.QUEUED] - request.age_s
        return as_chunks(self.reading.moved, attempt=request.attempt, received_at=received_at)

    def life(self) -> Life:
        """Until now."""
        starts = [one.first_step_at for one in self.sequences if one.first_step_at is not None]
        return Life(
            queued_at=self.marks[AdmissionState.QUEUED],
            reserved_at=self.marks.get(AdmissionState.RESERVED),
            verified_at=self.marks.get("verified"),
            running_at=self.marks.get(AdmissionState.RUNNING),
            first_step_at=min(starts, default=None),
            first_token_at=self.marks.get("first_token"),
            ended_at=time.monotonic(),
            is_local=self.asked.mode is Mode.LOCAL,
        )

    @property
    def transfer_s(self) -> float:
        """From the grant until the sequences could run. Of a running admission."""
        return max(0.0, self.marks[AdmissionState.RUNNING] - self.marks[AdmissionState.FETCHING])

    def exposed_transfer(self) -> tuple[int, float]:
        """(bytes, seconds) of the hand-off behind its grant: what the prefill did not hide. Of a running admission."""
        assert self.fetch is not None
        total_s = self.marks[AdmissionState.RUNNING] - self.marks[AdmissionState.FETCHING]
        wait_s = self._split_fetch(max(0.0, self.marks["arrived"] - self.marks[AdmissionState.FETCHING]))[0]
        return self.fetch.num_bytes - self.fetch.early_bytes, max(0.0, total_s - wait_s)

    def _split_fetch(self, total_s: float) -> tuple[float, float, float, float]:
        """The time from the grant to the result in wait, post, move and slot read, by what the transfer thread
        measured. What it did not see is wait: it was not at it yet, or this loop was not."""
        if self.fetch is None:
            return total_s, 0.0, 0.0, 0.0
        times, parts = self.fetch.times, []
        for measured_s in (times.late_post_s, times.late_move_s, times.slot_s):
            parts.append(min(measured_s, total_s))
            total_s -= parts[-1]
        return total_s, parts[0], parts[1], parts[2]


class Intake:
    """Brings admissions from RESERVED to sequences. ``fetch`` is the hand-off, ``make_local`` the other way."""

    def __init__(self, context: WorkerContext, transfers: TransferThread, holders: Holders) -> None:
        self._context = context
        self._transfers = transfers
        self._holders = holders
        self._transfer_ids = itertools.count(1)

    def make_local(self, admission: Admission) -> list[Sequence]:
        """The first has nothing computed: the engine prefills what the prefix cache does not hold. The others are to
        be forked from it when it has paused behind its first token."""
        leader, *others = sequences = self._sequences(admission, admission.choices)
        if others:
            leader.pause_at, leader.is_kept = len(leader.tokens) + 1, True
            for sequence in others:
                sequence.num_computed = len(sequence.tokens) - 1
        return sequences

    async def fetch(self, admission: Admission) -> tuple[list[Sequence], tuple[FirstToken, ...]]:
        """Open, wait for the grant, move the blocks that are not here, verify them. Raises a typed error; nothing
        stays behind.

        The first sequence brings the blocks, the others are to be forked from it. Choices that ended at their first
        token have none."""
        engine = self._context.engine
        hashes = engine.hash_prefix(admission.tokens, admission.asked.request.cache_salt)
        held = engine.pool.hold(hashes, admission.reservation)
        asked = admission.asked
        assert asked.prefill is not None
        is_retry = asked.request.attempt > 1
        try:
            with self._holders.hand_off(asked.prefill, is_retry=is_retry, ticket=asked.ticket) as holder:
                sealed, blocks = await self._move(admission, holder, num_held=len(held))
        except BaseException:
            engine.pool.free(held)
            raise
        surplus = held[sealed.grant.first_block :]
        engine.pool.free(surplus)
        firsts = [first for first in sealed.first_tokens if first.finish_reason is None]
        sequences = self._sequences(admission, [first.choice for first in firsts])
        for sequence, first in zip(sequences, firsts, strict=True):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(first.token_id)
            sequence.hashes = list(hashes)
        sequences[0].block_table = held[: sealed.grant.first_block] + blocks
        sequences[0].has_unverified_kv = sealed.grant.digest is DigestKind.OFF
        return sequences, sealed.first_tokens

    async def _move(self, admission: Admission, holder: Holder, *, num_held: int) -> tuple[Sealed, list[int]]:
        """The granted blocks, read and verified."""
        parent = admission.span.traceparent
        with self._context.telemetry.begin("kv.handoff", parent=parent, peer=holder.address.worker_id) as span:
            return await self._open_and_read(admission, holder, span, num_held=num_held)

    async def _open_and_read(
        self, admission: Admission, holder: Holder, span: Span, *, num_held: int
    ) -> tuple[Sealed, list[int]]:
        asked, context = admission.asked, self._context
        admission.enter(AdmissionState.OPENED)
        request = asked.request
        opening = context.telemetry.begin("kv.open", parent=span.traceparent)
        offer = holder.open(
            (Claim if asked.is_held else Open)(
                handoff_id=asked.handoff_id,
                request_id=request.request_id,
                attempt=request.attempt,
                num_held_blocks=num_held,
                ticket=asked.ticket,
                traceparent=span.traceparent,
            )
        )
        outcome, reason = HandoffOutcome.OK, ""
        try:
            await context.failpoints.reach("decode.opened", request.request_id)
            link = await self._meet(holder, span)
            async with self._reading(admission, link, num_held, span) as reading:
                offer.on_ended = reading.give_up
                while not isinstance(message := await offer.next(), Sealed):
                    await context.failpoints.reach("decode.ready")
                    reading.take(message)
                opening.end()
                reading.span.link(message.traceparent)
                admission.enter(AdmissionState.FETCHING)
                try:
                    _check_firsts(message.first_tokens, admission)
                    self._check_grant(message.grant, admission, num_held)
                    await context.failpoints.reach("decode.granted", request.request_id)
                    return message, await reading.finish(message.grant, source=message.traceparent)
                finally:
                    admission.fetch = reading.result
                    admission.reading = reading
                    admission.marks.update(reading.marks)
        except BaseException as error:
            opening.fail(error)
            outcome, reason = _outcome(admission, error), str(error)
            raise
        finally:
            num_bytes = 0 if admission.fetch is None else admission.fetch.num_bytes
            holder.close(offer, outcome, num_bytes=num_bytes, reason=reason)

    async def _meet(self, holder: Holder, above: Span) -> Link:
        """The proven link; a span says of the first contact how long it took."""
        if holder.is_met:
            return await holder.link()
        address = holder.address
        with self._context.telemetry.begin(
            "kv.handshake",
            parent=above.traceparent,
            kind="client",
            peer=address.worker_id,
            peer_incarnation=format_incarnation(address.incarnation),
        ) as span:
            link = await holder.link()
            span.set(backend=link.peer.link.backend, mode=str(link.peer.link.mode))
            return link

    def _reading(self, admission: Admission, link: Link, num_held: int, above: Span) -> Reading:
        span = self._context.telemetry.begin(
            "kv.transfer",
            parent=above.traceparent,
            kind="consumer",
            peer=link.peer.worker_id,
            peer_incarnation=format_incarnation(link.peer.incarnation),
            incarnation=format_incarnation(self._context.incarnation),
            backend=link.peer.link.backend,
            mode=str(link.peer.link.mode),
            direction="pull" if link.peer.link.mode is TransferMode.READ else "push",
            transport=self._transport(link),
            retries=admission.asked.request.attempt - 1,
        )
        return Reading(
            self._context,
            self._transfers,
            link,
            transfer_id=next(self._transfer_ids),
            indices=range(num_held, self._context.geometry.blocks_for(admission.num_tokens)),
            reservation=admission.reservation,
            deadline_at=admission.deadline_at,
            span=span,
        )

    def _transport(self, link: Link) -> str:
        """What carries the bytes, as the handshake saw it."""
        report = self._transfers.report(link.peer)
        return "" if report is None or report.chosen is None else report.chosen.lane

    def _check_grant(self, grant: Grant, admission: Admission, num_held: int) -> None:
        """It is about this prompt, and nothing is missing between what is here and what it gives."""
        num_blocks = self._context.geometry.blocks_for(admission.num_tokens)
        if grant.num_tokens != admission.num_tokens or grant.first_block + len(grant.block_ids) != num_blocks:
            raise LayoutMismatch(f"the grant is for {grant.num_tokens} tokens, the request has {admission.num_tokens}")
        if grant.first_block > num_held:
            raise LayoutMismatch(f"the grant begins at block {grant.first_block}, {num_held} blocks are here")

    def _sequences(self, admission: Admission, choices: list[int]) -> list[Sequence]:
        """One for each of ``choices``, with its part of what was reserved."""
        request = admission.asked.request
        reservation, admission.reservation = admission.reservation, None
        parts: list[Reservation | None] = [reservation]
        if reservation is not None:
            parts += [reservation.split(admission.num_blocks_apart) for _ in choices[1:]]
            reservation.split(admission.num_blocks_apart * (len(admission.choices) - len(choices))).release()
        return [
            Sequence(
                key=SequenceKey(request_id=request.request_id, attempt=request.attempt, choice=choice),
                sampling=request.sampling,
                tokens=admission.tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                reservation=part,
                priority=request.priority,
                salt=request.cache_salt,
                grammar=None if admission.grammar is None else admission.grammar.start(),
            )
            for choice, part in zip(choices, parts, strict=True)
        ]


def _outcome(admission: Admission, error: BaseException) -> HandoffOutcome:
    """What the holder is told. The request is over where its attempt was aborted or its deadline has passed; what only
    this worker cannot do is left to another."""
    if isinstance(error, asyncio.CancelledError) and not admission.is_resumed:
        return HandoffOutcome.ABORTED
    outcome = outcome_of(error)
    return HandoffOutcome.NO_CAPACITY if outcome is HandoffOutcome.ABORTED else outcome


def _check_firsts(firsts: tuple[FirstToken, ...], admission: Admission) -> None:
    """There is one for each choice, and something to go on with."""
    choices = [first.choice for first in firsts]
    if sorted(choices) != sorted(admission.choices):
        raise LayoutMismatch(f"first tokens of choices {choices} came, {admission.choices} were asked")
    if all(first.finish_reason is not None for first in firsts):
        raise LayoutMismatch("every choice ended at its first token: there is nothing to hand off")
