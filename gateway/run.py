"""The progress of one request: what was accepted of each choice, which attempts it took, where its time went."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from core import types as t
from core.errors import Cancelled, ServingError
from core.ids import Incarnation, WorkerId
from core.spans import NO_SPAN, Span
from gateway.lane import Lane
from gateway.prefill_leg import PrefillLeg
from gateway.prompt_blocks import PromptBlocks
from gateway.stages import StageClock
from gateway.text import ChoiceText, TextDelta
from gateway.trace import RequestTrace
from gateway.workload import workload_class

Sink = Callable[[TextDelta], None]
MAX_HISTORY = 16
"""Attempts of one request that its record tells of, the latest: refusals for lack of room may be many."""
MAX_MESSAGE = 300
"""Characters of an error in a record."""


def _nowhere(delta: TextDelta) -> None:
    pass


class Choice:
    """One choice of a request. Its accepted tokens are never taken back; `sink` is told what each of them adds."""

    __slots__ = ("accepted", "finish_reason", "is_ended_by_decode", "lane", "num_overrun", "number", "sink", "text")

    def __init__(self, number: int, text: ChoiceText, sink: Sink = _nowhere, lane: Lane | None = None) -> None:
        self.number = number
        self.text = text
        self.sink = sink
        self.lane = lane
        """The short way to the client, where there is one."""
        self.accepted: list[int] = []
        self.finish_reason: t.FinishReason | None = None
        self.is_ended_by_decode = False
        """D itself said that the choice ended; it needs no abort."""
        self.num_overrun = 0


@dataclass(slots=True, kw_only=True)
class Branch:
    """Choices that go one way because they have accepted the same tokens: one attempt after the other serves them all.

    After a failure choices that have come apart go on in branches of their own, each with the past of this one: so no
    choice fails more often than a request of its own might.
    """

    choices: tuple[Choice, ...]
    num_failed: int = 0
    num_refused: int = 0
    excluded_workers: list[tuple[WorkerId, Incarnation]] = field(default_factory=list)
    excluded_pairs: list[tuple[WorkerId, Incarnation, WorkerId, Incarnation]] = field(default_factory=list)
    refused_since_s: float | None = None
    """When the first of the refusals since the last token came."""
    placement: t.Placement | None = None
    """Of the current attempt; None while the router decides."""
    span: Span = NO_SPAN
    """Of the current attempt."""
    prefill: PrefillLeg | None = None
    """What is under way, or held, at a prefill worker. It outlives attempts whose decode worker failed."""

    def apart(self) -> "list[Branch]":
        """The unfinished choices, in branches of what each has accepted by now."""
        together: dict[tuple[int, ...], list[Choice]] = {}
        for choice in self.choices:
            if choice.finish_reason is None:
                together.setdefault(tuple(choice.accepted), []).append(choice)
        return [
            replace(
                self,
                choices=tuple(choices),
                excluded_workers=list(self.excluded_workers),
                excluded_pairs=list(self.excluded_pairs),
                prefill=None,
            )
            for choices in together.values()
        ]

    @property
    def num_generated(self) -> int:
        """Tokens accepted so far, of all choices."""
        return sum(len(choice.accepted) for choice in self.choices)

    @property
    def accepted(self) -> tuple[int, ...]:
        """The same for all choices when an attempt begins, or when what is held was asked for."""
        return tuple(self.choices[0].accepted) if self.prefill is None else self.prefill.accepted

    @property
    def is_together(self) -> bool:
        """One attempt can serve these choices as they are now."""
        first = self.choices[0]
        return all(choice.finish_reason is None and choice.accepted == first.accepted for choice in self.choices)

    def end_prefill(self, reason: str) -> None:
        """Nobody will fetch what is under way or held there."""
        if self.prefill is not None:
            self.prefill.end(reason)
            self.prefill = None


class Run:
    """One request on its way. `request.deadline_s` and `request.age_s` count from the start of `stages`."""

    def __init__(
        self,
        request: t.GenerateRequest,
        choices: Sequence[Choice],
        stages: StageClock,
        *,
        blocks: PromptBlocks | None = None,
        is_scoring: bool = False,
    ) -> None:
        assert len(choices) == request.sampling.n, "a choice for each sample"
        self.request = request
        self.choices = tuple(choices)
        self.stages = stages
        for choice in self.choices:
            if choice.lane is not None:
                choice.lane.join(choice.accepted, stages)
        self.blocks = blocks
        """None: nobody need look for workers that hold what the prompt begins with."""
        self.is_scoring = is_scoring
        """Only the log probabilities of the prompt are wanted: the one token behind it is part of no answer."""
        self.attempt = 0
        """The number of the last attempt."""
        self.last_placement: t.Placement | None = None
        self.history: deque[t.AttemptRecord] = deque(maxlen=MAX_HISTORY)
        self.ttft_s: float | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[t.TokenLogprobs, ...] = ()
        """Of the prompt's tokens from the second on, when they were asked for."""
        self.times: t.StageTimes | None = None
        """As D told them last: with the first token, and with the end of each choice."""
        self.outcome = ""
        self.last_token_s = 0.0
        """When the run ended."""
        self.trace = RequestTrace()
        """It ends when the run is closed."""

    @property
    def is_over(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_scored(self) -> bool:
        """What was asked about the prompt is there."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) == self.request.num_prompt_tokens - 1

    @property
    def num_completion_tokens(self) -> int:
        return 0 if self.is_scoring else sum(len(choice.accepted) for choice in self.choices)

    @property
    def num_overrun(self) -> int:
        """Tokens that came after a stop string had matched."""
        return sum(choice.num_overrun for choice in self.choices)

    # -- what is asked of others --------------------------------------------------------------------------------------

    def remaining_s(self) -> float:
        return self.request.deadline_s - self.stages.elapsed_s()

    def request_of(self, branch: Branch, attempt: int, span: Span = NO_SPAN) -> t.GenerateRequest:
        """The request as this attempt sends it: accepted tokens included, durations as of now. ``span`` is the
        call's."""
        accepted = branch.accepted
        return replace(
            self.request,
            attempt=attempt,
            choices=tuple(t.ChoiceProgress(choice=one.number, accepted=accepted) for one in branch.choices),
            deadline_s=max(self.remaining_s(), 0.0),
            age_s=self.stages.elapsed_s(),
            traceparent=span.traceparent or self.request.traceparent,
        )

    def place_request(self, branch: Branch, attempt: int, span: Span = NO_SPAN) -> t.PlaceRequest:
        request, accepted = self.request, branch.accepted
        num_accepted = len(accepted)
        return t.PlaceRequest(
            request_id=request.request_id,
            model=request.model,
            attempt=attempt,
            num_prompt_tokens=request.num_prompt_tokens + num_accepted,
            max_new_tokens=request.sampling.max_tokens - num_accepted,
            block_hashes=self.blocks.with_answer(request.prompt_token_ids, accepted) if self.blocks else (),
            gateway_id=request.gateway_id,
            gateway_incarnation=request.gateway_incarnation,
            deadline_s=max(self.remaining_s(), 0.0),
            age_s=self.stages.elapsed_s(),
            priority=request.priority,
            tenant=request.tenant,
            excluded_workers=tuple(branch.excluded_workers),
            excluded_pairs=tuple(branch.excluded_pairs),
            held=None if branch.prefill is None else branch.prefill.held,
            traceparent=span.traceparent or request.traceparent,
        )

    # -- progress -----------------------------------------------------------------------------------------------------

    def begin_attempt(self, branch: Branch) -> int:
        """A new attempt number, also after a refusal: the old one may have left a tombstone at a worker."""
        self.attempt += 1
        self.stages.attempt = self.attempt
        branch.placement = None
        return self.attempt

    def begin(self, branch: Branch, placement: t.Placement) -> None:
        branch.placement = self.last_placement = placement
        self.stages.mark(t.Stage.ROUTE)
        self.stages.divide(t.Stage.ROUTE, ((t.Stage.ROUTE_QUEUE, placement.queue_s),), rest=t.Stage.ROUTE)

    def note_attempt(
        self, branch: Branch, number: int, since_s: float, *, outcome: str, error: ServingError | None = None
    ) -> None:
        """An attempt has ended that began at ``since_s``."""
        placement = branch.placement
        if placement is not None and placement.ticket:
            placement = replace(placement, ticket=b"")  # records are read by more than one worker
        self.history.append(
            t.AttemptRecord(
                attempt=number,
                started_s=since_s,
                duration_s=self.stages.elapsed_s() - since_s,
                num_choices=len(branch.choices),
                outcome=outcome,
                message="" if error is None else error.message[:MAX_MESSAGE],
                placement=placement,
            )
        )

    def refused_for_s(self, branch: Branch) -> float:
        """How long workers have been refusing these choices for lack of room."""
        now_s = self.stages.elapsed_s()
        if branch.refused_since_s is None:
            branch.refused_since_s = now_s
        return now_s - branch.refused_since_s

    def finish(self) -> None:
        """Every choice has its finish reason."""
        lengths = [choice.finish_reason is t.FinishReason.LENGTH for choice in self.choices]
        self.end(t.FinishReason.LENGTH if any(lengths) else t.FinishReason.STOP)

    def end(self, outcome: str) -> None:
        """No token is accepted any more; only the first call counts."""
        if self.outcome:
            return
        self.outcome = outcome
        self.stages.mark(t.Stage.DECODE if self.is_over else t.Stage.LOST)
        self.last_token_s = self.stages.total_s()
        if self.is_over and self.times is not None and self.times.decode_s:
            self.stages.divide(t.Stage.DECODE, _parts_of_decode(self.times))

    def close(self, *, is_sent: bool) -> t.RequestRecord:
        """Nothing is done for it any more. ``is_sent``: all of its answer was handed to the socket, just now."""
        self.end(Cancelled.slug)
        if is_sent:
            self.stages.mark(t.Stage.DELIVERY)
        record = self.record()
        self.trace.end(record, self.request)
        return record

    # -- how it went --------------------------------------------------------------------------------------------------

    def record(self) -> t.RequestRecord:
        placement = self.last_placement
        prefill = placement.prefill if placement else None
        return t.RequestRecord(
            request_id=self.request.request_id,
            model=self.request.model,
            outcome=self.outcome,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens,
            attempts=self.attempt,
            mode=placement.mode if placement else "",
            prefill_worker=prefill.worker_id if prefill else "",
            decode_worker=placement.decode.worker_id if placement else "",
            reason=placement.reason if placement else "",
            stages=self.stages.stages(),
            ttft_s=self.ttft_s or 0.0,
            duration_s=self.stages.total_s(),
            traceparent=self.request.traceparent,
            transfer_bytes=self.times.transfer_bytes if self.times else 0,
            transfer_backend=self.times.transfer_backend if self.times else "",
            history=tuple(self.history),
            timeline=self._timeline(),
            times=self.times,
            workload_class=self.workload_class,
        )

    @property
    def workload_class(self) -> str:
        """By what has come of it so far."""
        request = self.request
        return workload_class(request.num_prompt_tokens, self.num_completion_tokens, request.priority)

    def _timeline(self) -> tuple[t.StageInterval, ...]:
        placements = {one.attempt: one.placement for one in self.history}
        placements.setdefault(self.attempt, self.last_placement)
        return tuple(
            replace(one, worker=_worker_of(one.stage, placements.get(one.attempt))) for one in self.stages.intervals()
        )


_OF_PREFILL = (t.Stage.PREFILL_QUEUE, t.Stage.PREFILL)
_OF_DECODE = (t.Stage.HANDOFF_WAIT, t.Stage.TRANSFER, t.Stage.DECODE_QUEUE, t.Stage.DECODE)


def _worker_of(stage: str, placement: t.Placement | None) -> str:
    if placement is None or stage not in (*_OF_PREFILL, *_OF_DECODE):
        return ""
    is_prefills = stage in _OF_PREFILL and placement.prefill is not None
    return placement.prefill.worker_id if is_prefills and placement.prefill else placement.decode.worker_id


def _parts_of_decode(times: t.StageTimes) -> tuple[tuple[t.Stage, float], ...]:
    """Of the time from D's first word to its last, what D measured."""
    return (
        (t.Stage.DECODE_QUEUE, times.decode_queue_s),
        (t.Stage.DECODE, times.decode_s),
        (t.Stage.DELIVERY, times.delivery_s),
    )
