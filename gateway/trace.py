"""What a trace tells of one request at the gateway: the root, a span for each attempt and each call of one.

::

    chat MODEL  server, with the stages as attributes
      |- admission, tokenize, admission.limits
      |- attempt  (the next one links to it when it failed)
      |    |- route    client -> the router's
      |    |- prefill  client -> the prefill worker's
      |    '- decode   client -> the decode worker's, kv.* below it
      '- stream  from the first token until the answer was handed to the socket

Nothing is done for each token. What was measured anyway becomes spans when the request is over.
"""

from collections.abc import Sequence

from core import semconv
from core.spans import NO_SPAN, Kind, Span, Value
from core.telemetry import Telemetry
from core.types import FinishReason, GenerateRequest, RequestRecord, Stage

_TOLD_STAGES = (Stage.ADMISSION, Stage.TOKENIZE)


class RequestTrace:
    """Costs nothing where nobody collects."""

    def __init__(self, telemetry: Telemetry | None = None, root: Span = NO_SPAN, *, started_at: float = 0.0) -> None:
        """``started_at`` is the ``time.monotonic`` of the request's arrival, at which ``root`` began."""
        self._telemetry = telemetry
        self._started_at = started_at
        self._failed = ""
        self.root = root

    @property
    def is_told(self) -> bool:
        return self.root.is_told

    def begin(self, name: str, above: Span, *, kind: Kind = "internal", **attributes: Value) -> Span:
        """A span below another of this trace."""
        if self._telemetry is None or not above.is_told:
            return Span(None, above.traceparent)
        return self._telemetry.begin(
            name, parent=above.traceparent, trace_id="", kind=kind, started_at=None, **attributes
        )

    def attempt(self, number: int, num_choices: int) -> Span:
        """Linked to the attempt that failed before it, if one did."""
        span = self.begin("attempt", self.root, attempt=number, choices=num_choices)
        span.link(self._failed)
        return span

    def attempt_failed(self, span: Span) -> None:
        self._failed = span.traceparent

    def end(self, record: RequestRecord, request: GenerateRequest) -> None:
        """The request is closed. The root's stages sum to its length."""
        if not self.root.is_told or self._telemetry is None:
            return
        parent, start = self.root.traceparent, self._started_at
        told: set[str] = set()
        for one in record.timeline:
            if one.stage in _TOLD_STAGES:
                name = f"{one.stage}.limits" if one.stage in told else one.stage
                self._telemetry.tell(name, start + one.start_s, start + one.start_s + one.duration_s, parent=parent)
                told.add(one.stage)
        ended_at, is_answered = start + record.duration_s, any(record.outcome == reason for reason in FinishReason)
        outcome = "ok" if is_answered else record.outcome
        if record.ttft_s:
            self._telemetry.tell(
                "stream",
                start + record.ttft_s,
                ended_at,
                parent=parent,
                outcome=outcome,
                tokens=record.num_completion_tokens,
            )
        self.root.set(**_asked(request), **_came(record))
        self.root.end(outcome, ended_at=ended_at)


def _asked(request: GenerateRequest) -> dict[str, Value]:
    sampling = request.sampling
    asked: dict[str, Value] = {
        semconv.REQUEST_MODEL: request.model,
        semconv.REQUEST_MAX_TOKENS: sampling.max_tokens,
        semconv.REQUEST_TEMPERATURE: sampling.temperature,
        semconv.REQUEST_TOP_P: sampling.top_p,
        semconv.REQUEST_SEED: sampling.seed,
        semconv.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        semconv.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    if sampling.top_k:
        asked[semconv.REQUEST_TOP_K] = sampling.top_k
    if sampling.n != 1:
        asked[semconv.REQUEST_CHOICES] = sampling.n
    return asked


def _came(record: RequestRecord) -> dict[str, Value]:
    is_answered = any(record.outcome == reason for reason in FinishReason)
    finish_reasons: Sequence[str] = (record.outcome,) if is_answered else ()
    came: dict[str, Value] = {
        semconv.RESPONSE_ID: record.request_id,
        semconv.RESPONSE_MODEL: record.model,
        semconv.RESPONSE_FINISH_REASONS: tuple(finish_reasons),
        semconv.USAGE_INPUT_TOKENS: record.num_prompt_tokens,
        semconv.USAGE_OUTPUT_TOKENS: record.num_completion_tokens,
        semconv.USAGE_CACHE_READ_TOKENS: record.num_cached_tokens,
        "request_id": record.request_id,
        "attempts": record.attempts,
        "mode": record.mode,
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
        "reason": record.reason,
        "workload_class": record.workload_class,
    }
    if record.ttft_s:
        came[semconv.RESPONSE_TIME_TO_FIRST_CHUNK] = record.ttft_s
    return came | {f"stage.{stage}_s": seconds for stage, seconds in record.stages}
