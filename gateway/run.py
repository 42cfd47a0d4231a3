"""The progress of one request: what was accepted, where it runs, who is avoided, where its time went."""

from dataclasses import replace

from core import types as t
from core.errors import InternalError
from core.ids import Incarnation, WorkerId
from gateway.stages import StageClock
from gateway.text import ChoiceText, TextDelta

Event = t.TokenChunk | t.AttemptAccepted | t.AdmitReply | t.PrefillReply


class Run:
    """One request on its way. `request.deadline_s` and `request.age_s` count from the start of `stages`.

    An attempt, as `take` sees it (split; in local mode tokens come from D only)::

        waiting --PrefillReply--> holding token 1 --D accepted--> streaming --finish--> ended
           '------------- TokenChunk from D ------------------------^
    """

    def __init__(self, request: t.GenerateRequest, text: ChoiceText, stages: StageClock) -> None:
        self.request = request
        self.text = text
        self.stages = stages
        self.accepted: list[int] = []
        self.finish_reason: t.FinishReason | None = None
        self.is_ended_by_decode = False
        """D itself said that the choice ended; it needs no abort."""
        self.attempt = 0
        self.num_failed = 0
        self.num_refused = 0
        self.excluded_workers: list[tuple[WorkerId, Incarnation]] = []
        self.excluded_pairs: list[tuple[WorkerId, Incarnation, WorkerId, Incarnation]] = []
        self.placement: t.Placement | None = None
        """Of the current attempt; None while the router decides."""
        self.last_placement: t.Placement | None = None
        self.ttft_s: float | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[t.TokenLogprobs] = []
        """Of the prompt's tokens from the second on, when they were asked for."""
        self.num_overrun = 0
        self.times: t.StageTimes | None = None
        """As D told them with the end of the choice."""
        self.outcome = ""
        self._first: t.FirstToken | None = None
        self._is_admitted = False
        self._has_prefill_reply = False
        self._has_decode_chunk = False
        self._first_refusal_s: float | None = None

    # -- what is asked of others --------------------------------------------------------------------------------------

    def remaining_s(self) -> float:
        return self.request.deadline_s - self.stages.elapsed_s()

    def current_request(self) -> t.GenerateRequest:
        """The request as this attempt sends it: accepted tokens included, durations as of now."""
        return replace(
            self.request,
            attempt=self.attempt,
            choices=(t.ChoiceProgress(choice=0, accepted=tuple(self.accepted)),),
            deadline_s=max(self.remaining_s(), 0.0),
            age_s=self.stages.elapsed_s(),
        )

    def place_request(self) -> t.PlaceRequest:
        request = self.request
        return t.PlaceRequest(
            request_id=request.request_id,
            model=request.model,
            attempt=self.attempt,
            num_prompt_tokens=request.num_prompt_tokens + len(self.accepted),
            max_new_tokens=request.sampling.max_tokens - len(self.accepted),
            gateway_id=request.gateway_id,
            gateway_incarnation=request.gateway_incarnation,
            deadline_s=max(self.remaining_s(), 0.0),
            age_s=self.stages.elapsed_s(),
            priority=request.priority,
            tenant=request.tenant,
            excluded_workers=tuple(self.excluded_workers),
            excluded_pairs=tuple(self.excluded_pairs),
            traceparent=request.traceparent,
        )

    # -- progress -----------------------------------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """A new attempt number, also after a refusal: the old one may have left a tombstone at a worker."""
        self.attempt += 1
        self.placement = None

    def begin(self, placement: t.Placement) -> None:
        self.placement = self.last_placement = placement
        if len(self.prompt_logprobs) < self._num_prompt_scores:
            self.prompt_logprobs.clear()  # the attempt before was cut off in the middle of them
        self._first = None
        self._is_admitted = self._has_prefill_reply = self._has_decode_chunk = False
        self.stages.mark("place")

    def refused_for_s(self) -> float:
        """How long workers have been refusing this request for lack of room."""
        now_s = self.stages.elapsed_s()
        if self._first_refusal_s is None:
            self._first_refusal_s = now_s
        return now_s - self._first_refusal_s

    def take(self, event: Event) -> TextDelta | None:
        """What one event adds to the answer. Token 1 waits until D has accepted, unless it ends the request."""
        match event:
            case t.TokenChunk():
                self._is_admitted = True
                self._take_prompt_scores(event.prompt_logprobs)
                self._mark_decode_chunk(event)
                return self._accept(event)
            case t.AdmitReply():
                self._is_admitted = self._is_admitted or event.verdict is t.AdmitVerdict.ACCEPTED
            case t.AttemptAccepted():
                self._is_admitted = True
            case t.PrefillReply():
                self._take_prefill_reply(event)
        first = self._first
        if first is None or not (self._is_admitted or first.finish_reason):
            return None
        self._first = None
        if not self._has_decode_chunk:
            self.stages.mark("admit")
        return self._accept(
            t.TokenChunk(
                request_id=self.request.request_id,
                choice=first.choice,
                attempt=self.attempt,
                first_index=first.index,
                token_ids=(first.token_id,),
                logprobs=() if first.logprobs is None else (first.logprobs,),
                finish_reason=first.finish_reason,
                stop_token_id=first.stop_token_id,
            )
        )

    @property
    def _num_prompt_scores(self) -> int:
        return self.request.num_prompt_tokens - 1

    def _take_prompt_scores(self, scores: tuple[t.TokenLogprobs, ...]) -> None:
        """Once: every attempt computes them again."""
        if len(self.prompt_logprobs) < self._num_prompt_scores:
            self.prompt_logprobs += scores

    def _take_prefill_reply(self, reply: t.PrefillReply) -> None:
        self._take_prompt_scores(reply.prompt_logprobs)
        self._first = reply.first_tokens[0]
        self._has_prefill_reply = True
        self.num_cached_tokens = reply.num_cached_tokens
        if not self._has_decode_chunk:
            self.stages.mark("first")
        # D's first chunk may overtake this reply; the wait it ended was still P's work.
        self.stages.divide("first", (("queue", reply.stages.prefill_queue_s), ("prefill", reply.stages.prefill_s)))

    def _mark_decode_chunk(self, chunk: t.TokenChunk) -> None:
        if self._has_decode_chunk:
            self.stages.mark("decode")
        else:
            # The wait for D's first chunk: for its KV if P's token was there before, for the whole prompt if not.
            self.stages.mark("transfer" if self._has_prefill_reply else "first")
        self._has_decode_chunk = True
        if chunk.stages is not None:
            self.times = chunk.stages
            self.num_cached_tokens = max(self.num_cached_tokens, chunk.stages.num_cached_tokens)

    def _accept(self, chunk: t.TokenChunk) -> TextDelta | None:
        """Accepts what is new in a chunk: repeated tokens are dropped, a gap is an error."""
        num_known = len(self.accepted) - chunk.first_index
        if num_known < 0:
            decode = None if self.placement is None else self.placement.decode.worker_id
            raise InternalError(
                f"tokens {len(self.accepted)} to {chunk.first_index - 1} of the answer are missing", worker_id=decode
            )
        token_ids = chunk.token_ids[num_known:]
        if not token_ids and chunk.finish_reason is None:
            return None
        delta = self.text.append(
            token_ids,
            chunk.logprobs[num_known:],
            finish_reason=chunk.finish_reason,
            stop_token_id=chunk.stop_token_id,
            is_callers_stop=chunk.stop_token_id in self.request.sampling.stop_token_ids,
        )
        self.accepted += delta.token_ids
        self._first_refusal_s = None  # it runs: a later refusal is borne anew
        self.num_overrun += delta.num_overrun
        self.finish_reason = delta.finish_reason
        self.is_ended_by_decode = self._has_decode_chunk and chunk.finish_reason is not None
        if self.ttft_s is None and token_ids:
            self.ttft_s = self.stages.elapsed_s()
        return delta

    def end(self, outcome: str) -> None:
        """The request is over; only the first call counts."""
        if self.outcome:
            return
        self.outcome = outcome
        self.stages.mark("decode" if self.finish_reason is not None else "lost")
        times = self.times or t.StageTimes()
        self.stages.divide("first", (("queue", times.prefill_queue_s), ("prefill", times.prefill_s)))

    # -- how it went --------------------------------------------------------------------------------------------------

    def record(self) -> t.RequestRecord:
        placement = self.last_placement
        prefill = placement.prefill if placement else None
        return t.RequestRecord(
            request_id=self.request.request_id,
            model=self.request.model,
            outcome=self.outcome,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_completion_tokens=len(self.accepted),
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
        )
