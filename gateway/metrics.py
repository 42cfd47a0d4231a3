"""The gateway's metrics: names and buckets live here, the registry in core.telemetry.

Series of the models of the configuration exist from the start, at zero. Exemplars bear the id of the request's trace.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.config import ModelConfigSection
from core.errors import ERRORS_BY_SLUG, Cancelled, DeadlineExceeded
from core.telemetry import METRIC_PREFIX
from core.types import FinishReason, RequestRecord, Stage, StageInterval
from gateway.run import Run
from gateway.workload import workload_class

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10, 30, 60)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_LENGTH_BUCKETS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MET = {True: "yes", False: "no"}
CAUSES = {Cancelled.slug: "client", DeadlineExceeded.slug: "deadline"}
"""Of requests that are given up, by outcome."""
T = TypeVar("T")
Labels = Callable[..., T]
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class GatewayMetrics:
    """Counters and histograms of one gateway process. Labels are bounded: model names, outcomes, stages, routes.

    Of what every run is counted in, the child of each label is looked up once.
    """

    def __init__(self, registry: CollectorRegistry, models: Sequence[ModelConfigSection] = ()) -> None:
        """The objectives of ``models`` (``autoscale.ttft_s``, ``autoscale.tpot_s``) are what is said to be met."""

        def name(stem: str) -> str:
            return f"{METRIC_PREFIX}_gateway_{stem}"

        self.running = Gauge(name("num_requests_running"), "Requests being worked on.", registry=registry)
        self.responses = cache(
            Counter(name("http_responses"), "HTTP answers.", ("route", "status"), registry=registry).labels
        )
        self.aborts = Counter(
            name("client_aborts"), "Requests that ended because nobody read.", ("reason",), registry=registry
        )
        self.unknown_fields = Counter(
            name("unknown_fields"), "Members of bodies that this API does not know.", ("route",), registry=registry
        )
        self._requests = cache(
            Counter(name("requests"), "Requests that ended.", ("model", "outcome"), registry=registry).labels
        )
        self._attempts = cache(
            Counter(name("attempts"), "Attempts made, first ones included.", ("model",), registry=registry).labels
        )
        self._prompt_tokens = cache(
            Counter(name("prompt_tokens"), "Prompt tokens.", ("model",), registry=registry).labels
        )
        self._tokens = cache(
            Counter(name("generation_tokens"), "Accepted tokens.", ("model",), registry=registry).labels
        )
        self._overrun = cache(
            Counter(
                name("overrun_tokens"), "Tokens made after a stop string had matched.", ("model",), registry=registry
            ).labels
        )
        self._aborts_by_cause = cache(
            Counter(name("aborts"), "Requests that were given up.", ("model", "cause"), registry=registry).labels
        )
        self._cached_tokens = cache(
            Counter(
                name("cached_prompt_tokens"),
                "Of the prompt tokens, those found in a cache.",
                ("model",),
                registry=registry,
            ).labels
        )
        self._slo = cache(
            Counter(
                name("slo_requests"),
                "Answered requests that met their objective, or missed it.",
                ("model", "slo", "met"),
                registry=registry,
            ).labels
        )
        by_work = ("model", "workload")

        def histogram(stem: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Labels[Histogram]:
            return cache(Histogram(name(stem), text, labels, buckets=buckets, registry=registry).labels)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival.", by_work, _TTFT_BUCKETS)
        self._tpot = histogram(
            "time_per_output_token_seconds",
            "First to last token, for each token after the first.",
            by_work,
            _TPOT_BUCKETS,
        )
        self._duration = histogram(
            "e2e_request_latency_seconds",
            "From arrival until the answer was handed to the socket.",
            by_work,
            _E2E_BUCKETS,
        )
        self._ttft_stage = histogram(
            "ttft_stage_seconds",
            "Stages until the first token: they sum to the time to it.",
            ("model", "stage"),
            _TTFT_BUCKETS,
        )
        self._prompt_lengths = histogram("request_prompt_tokens", "Of a prompt.", ("model",), _LENGTH_BUCKETS)
        self._answer_lengths = histogram("request_generation_tokens", "Of an answer.", ("model",), _LENGTH_BUCKETS)
        self._refusals = Counter(
            name("access_refusals"),
            "Requests that their key, or the lack of one, did not allow.",
            ("reason",),
            registry=registry,
        )
        self._store_failures = Counter(
            name("access_store_failures"),
            "Calls that a store of keys, usage or limits failed.",
            ("store", "kind"),
            registry=registry,
        )
        self._stage = cache(
            Counter(name("stage_seconds"), "Where the time went.", ("model", "stage"), registry=registry).labels
        )
        self._objectives = {section.name: section.autoscale for section in models}
        self._begin(models)

    def observe_store_failure(self, store: str, kind: str) -> None:
        """Counts a call that the store of access (``database`` or ``limits``) did not answer as it should."""
        self._store_failures.labels(store, kind).inc()

    def observe_refusal(self, reason: str) -> None:
        """Counts a request that access refused; reasons are a few words."""
        self._refusals.labels(reason).inc()

    def _begin(self, models: Sequence[ModelConfigSection]) -> None:
        """Series that a dashboard asks for are there before there is anything to count."""
        for section in models:
            model = section.name
            for outcome in (*FinishReason, *ERRORS_BY_SLUG):
                self._requests(model, str(outcome))
            for cause in CAUSES.values():
                self._aborts_by_cause(model, cause)
            for counter in (
                self._attempts,
                self._prompt_tokens,
                self._cached_tokens,
                self._tokens,
                self._overrun,
                self._prompt_lengths,
                self._answer_lengths,
            ):
                counter(model)
            for histogram in (self._ttft, self._tpot, self._duration):
                histogram(model, workload_class(0, 0, 0))
            for stage in Stage:
                self._stage(model, stage.value)
                self._ttft_stage(model, stage.value)
            for slo in ("ttft", "tpot"):
                for met in _MET.values():
                    self._slo(model, slo, met)

    def observe(self, run: Run, record: RequestRecord) -> None:
        """Counts a run that is closed."""
        model = record.model
        self._requests(model, record.outcome).inc()
        if record.outcome in CAUSES:
            self._aborts_by_cause(model, CAUSES[record.outcome]).inc()
        self._attempts(model).inc(record.attempts)
        self._prompt_tokens(model).inc(record.num_prompt_tokens)
        self._cached_tokens(model).inc(record.num_cached_tokens)
        self._tokens(model).inc(record.num_completion_tokens)
        if run.num_overrun:
            self._overrun(model).inc(run.num_overrun)
        for stage, seconds in record.stages:
            self._stage(model, stage).inc(seconds)
        if run.ttft_s is None or not run.is_over:
            return
        trace, workload = {"trace_id": record.trace_id}, record.workload_class
        self._prompt_lengths(model).observe(record.num_prompt_tokens)
        self._answer_lengths(model).observe(record.num_completion_tokens)
        self._ttft(model, workload).observe(run.ttft_s, trace)
        self._duration(model, workload).observe(record.duration_s, trace)
        for stage, seconds in _until(record.timeline, run.ttft_s):
            self._ttft_stage(model, stage).observe(seconds)
        slo = self._objectives.get(model)
        if slo is not None:
            self._slo(model, "ttft", _MET[run.ttft_s <= slo.ttft_s]).inc()
        if record.num_completion_tokens > 1:
            tpot_s = (run.last_token_s - run.ttft_s) / (record.num_completion_tokens - 1)
            self._tpot(model, workload).observe(tpot_s, trace)
            if slo is not None:
                self._slo(model, "tpot", _MET[tpot_s <= slo.tpot_s]).inc()


def _until(timeline: Sequence[StageInterval], moment_s: float) -> Iterator[tuple[str, float]]:
    """The sums of the stages before a moment."""
    sums: dict[str, float] = {}
    for one in timeline:
        seconds = min(one.start_s + one.duration_s, moment_s) - one.start_s
        if seconds > 0:
            sums[one.stage] = sums.get(one.stage, 0.0) + seconds
    yield from sums.items()
