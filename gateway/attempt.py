"""One attempt: some choices of a request on their way through one placement."""

from core import types as t
from core.errors import InternalError
from core.spans import NO_SPAN, Span
from gateway.lane import Lane
from gateway.run import Branch, Choice, Run
from gateway.text import TextDelta

Event = t.TokenChunk | t.AttemptAccepted | t.AdmitReply | t.PrefillReply


class Attempt:
    """Turns what workers say into accepted tokens. Split; in local mode tokens come from D only::

    waiting --PrefillReply--> holding first tokens --D accepted--> streaming --all choices finished--> over
       '------------- TokenChunk from D -------------------------------^
    """

    def __init__(self, run: Run, branch: Branch, number: int, placement: t.Placement) -> None:
        self.run = run
        self.branch = branch
        self.number = number
        self.placement = placement
        self.unread: set[int] = set()
        """Choices that ended by a stop string and that D still writes."""
        self._choices = {choice.number: choice for choice in branch.choices}
        self._firsts: list[t.FirstToken] = []
        self._is_admitted = False
        self._has_prefill_reply = False
        self._has_decode_chunk = False
        self._scores: tuple[t.TokenLogprobs, ...] = ()

    def lane(self, number: int) -> Lane | None:
        """The short way of a choice's tokens."""
        choice = self._choices.get(number)
        return None if choice is None else choice.lane

    def request(self, span: Span = NO_SPAN) -> t.GenerateRequest:
        """For a call that has this span."""
        return self.run.request_of(self.branch, self.number, span)

    def begin_span(self, name: str, worker: t.WorkerAddress) -> Span:
        """Of a call to a worker."""
        return self.run.trace.begin(name, self.branch.span, kind="client", attempt=self.number, worker=worker.worker_id)

    @property
    def is_taken(self) -> bool:
        """D has what P held, and P holds it no more."""
        return self._has_decode_chunk

    @property
    def is_over(self) -> bool:
        return self.run.is_scored and all(choice.finish_reason is not None for choice in self.branch.choices)

    @property
    def is_settled_by_decode(self) -> bool:
        """D ended every choice by itself: there is nothing to abort."""
        return all(choice.is_ended_by_decode for choice in self.branch.choices)

    def go_on_from(self, reply: t.PrefillReply) -> None:
        """An attempt before this one took it; first tokens that it did not accept are accepted when this D is there."""
        self._firsts = list(reply.first_tokens)
        self._has_prefill_reply = True

    def take(self, event: Event) -> None:
        """First tokens wait until D has accepted, unless they end their choice."""
        match event:
            case t.TokenChunk():
                self._is_admitted = True
                if event.prompt_logprobs:
                    self._take_prompt_scores(event.prompt_logprobs)
                self._mark_decode_chunk(event)
                self._accept(event)
                return
            case t.AdmitReply():
                self._is_admitted = self._is_admitted or event.verdict is t.AdmitVerdict.ACCEPTED
            case t.AttemptAccepted():
                self._is_admitted = True
            case t.PrefillReply():
                self._take_prefill_reply(event)
        ready = [first for first in self._firsts if self._is_admitted or first.finish_reason]
        if ready and not self._has_decode_chunk:
            self.run.stages.mark(t.Stage.HANDOFF_WAIT)
        self._firsts = [first for first in self._firsts if first not in ready]
        for first in ready:
            self._accept(self._chunk_of(first))

    def take_token(self, number: int, index: int, token_id: int, now: float) -> bool:
        """A token from D that is nothing but a token: most are. Whether its choice has ended."""
        choice = self._choices.get(number)
        if (
            choice is None
            or choice.finish_reason is not None
            or index != len(choice.accepted)
            or not self._has_decode_chunk
        ):
            chunk = t.TokenChunk(
                request_id=self.run.request.request_id,
                choice=number,
                attempt=self.number,
                first_index=index,
                token_ids=(token_id,),
            )
            self.take(chunk)
            return True
        self.run.stages.touched = now
        self._add(choice, choice.text.append_token(token_id), None)
        return choice.finish_reason is not None

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def _take_prompt_scores(self, scores: tuple[t.TokenLogprobs, ...]) -> None:
        """Once: every attempt computes them again, and one that is cut off may have brought a part of them."""
        self._scores += scores
        if not self.run.prompt_logprobs and len(self._scores) == self.run.request.num_prompt_tokens - 1:
            self.run.prompt_logprobs = self._scores

    def _take_prefill_reply(self, reply: t.PrefillReply) -> None:
        run = self.run
        if reply.prompt_logprobs:
            self._take_prompt_scores(reply.prompt_logprobs)
        self._firsts = list(reply.first_tokens)
        self._has_prefill_reply = True
        run.num_cached_tokens = reply.num_cached_tokens
        if not self._has_decode_chunk:
            run.stages.mark(t.Stage.PREFILL)
        # D's first chunk may overtake this reply: the wait that it ended was P's work, then the transfer.
        transfer_s = run.times.transfer_s if self._has_decode_chunk and run.times is not None else 0.0
        run.stages.divide(t.Stage.PREFILL, (*_prefill_parts(reply.stages), (t.Stage.TRANSFER, transfer_s)))

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _mark_decode_chunk(self, chunk: t.TokenChunk) -> None:
        run = self.run
        if self._has_decode_chunk:
            run.stages.touch()
        else:
            # The wait for D's first chunk: for its KV if P's token was there before, for the whole prompt if not.
            run.stages.mark(t.Stage.TRANSFER if self._has_prefill_reply else t.Stage.PREFILL)
            self._has_decode_chunk = True
            if chunk.stages is not None:
                self._divide_wait(chunk.stages)
        if chunk.stages is not None:
            run.times = chunk.stages
            run.num_cached_tokens = max(run.num_cached_tokens, chunk.stages.num_cached_tokens)

    def _divide_wait(self, times: t.StageTimes) -> None:
        """By what D measured until now. While P has not answered, only its answer divides the wait for it."""
        if self.placement.mode is t.Mode.LOCAL:
            self.run.stages.divide(t.Stage.PREFILL, _prefill_parts(times))
        elif self._has_prefill_reply:
            self.run.stages.divide(t.Stage.TRANSFER, ((t.Stage.TRANSFER, times.transfer_s),))

    def _accept(self, chunk: t.TokenChunk) -> None:
        """Accepts what is new in a chunk: repeated tokens are dropped, a gap is an error."""
        choice = self._choice(chunk)
        if choice.finish_reason is not None:
            if self._has_decode_chunk and chunk.finish_reason is None:
                self.unread.add(choice.number)
            else:
                self._settle(choice, chunk.finish_reason)
            return
        num_known = len(choice.accepted) - chunk.first_index
        if num_known < 0:
            raise InternalError(
                f"tokens {len(choice.accepted)} to {chunk.first_index - 1} of choice {choice.number} are missing",
                worker_id=self.placement.decode.worker_id,
            )
        token_ids = chunk.token_ids[num_known:] if num_known else chunk.token_ids
        if not token_ids and chunk.finish_reason is None:
            return
        delta = choice.text.append(
            token_ids,
            chunk.logprobs[num_known:],
            finish_reason=chunk.finish_reason,
            stop_token_id=chunk.stop_token_id,
            is_callers_stop=chunk.stop_token_id in self.run.request.sampling.stop_token_ids,
        )
        self._add(choice, delta, chunk.finish_reason)

    def _add(self, choice: Choice, delta: TextDelta, told: t.FinishReason | None) -> None:
        """``told`` is what the worker said with the tokens."""
        run = self.run
        choice.accepted += delta.token_ids
        self.branch.refused_since_s = None  # it runs: a later refusal is borne anew
        if run.ttft_s is None and delta.token_ids:
            run.ttft_s = run.stages.elapsed_s()
        if delta.finish_reason is not None:
            choice.num_overrun += delta.num_overrun
            choice.finish_reason = delta.finish_reason
            self._settle(choice, told)
            if self._has_decode_chunk and not choice.is_ended_by_decode:
                self.unread.add(choice.number)
            if run.is_over:
                run.finish()
        choice.sink(TextDelta(finish_reason=t.FinishReason.LENGTH) if run.is_scoring else delta)
        if choice.lane is not None:
            if self._has_decode_chunk and choice.text.is_plain:
                choice.lane.open_text()
            else:
                choice.lane.close_text()

    def close_lanes(self) -> None:
        """Nothing more is accepted in this attempt."""
        for choice in self.branch.choices:
            if choice.lane is not None:
                choice.lane.close_text()

    def _choice(self, chunk: t.TokenChunk) -> Choice:
        choice = self._choices.get(chunk.choice)
        if choice is None:
            raise InternalError(
                f"tokens of choice {chunk.choice}, which was not asked for", worker_id=self.placement.decode.worker_id
            )
        return choice

    def _settle(self, choice: Choice, told: t.FinishReason | None) -> None:
        choice.is_ended_by_decode = self._has_decode_chunk and told is not None

    def _chunk_of(self, first: t.FirstToken) -> t.TokenChunk:
        return t.TokenChunk(
            request_id=self.run.request.request_id,
            choice=first.choice,
            attempt=self.number,
            first_index=first.index,
            token_ids=(first.token_id,),
            logprobs=() if first.logprobs is None else (first.logprobs,),
            finish_reason=first.finish_reason,
            stop_token_id=first.stop_token_id,
        )


def _prefill_parts(times: t.StageTimes) -> tuple[tuple[t.Stage, float], ...]:
    """Waiting for room to read the prompt is part of its queue, whoever reads it."""
    is_local = not times.transfer_backend
    queue_s = times.prefill_queue_s + (times.reservation_s if is_local else 0.0)
    return (t.Stage.PREFILL_QUEUE, queue_s), (t.Stage.PREFILL, times.prefill_s)
