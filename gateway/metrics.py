"""The gateway's metrics (api.md 5): names and buckets live here, the registry in core.telemetry."""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.telemetry import METRIC_PREFIX
from gateway.run import Run

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10, 30, 60)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class GatewayMetrics:
    """Counters and histograms of one gateway process. Labels are bounded: model names, outcomes, stages, routes.

    Of what every run is counted in, the child of each label is looked up once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._ttft = cache(
            Histogram(
                name("time_to_first_token_seconds"),
                "From arrival.",
                ("model",),
                buckets=_TTFT_BUCKETS,
                registry=registry,
            ).labels
        )
        self._tpot = cache(
            Histogram(
                name("time_per_output_token_seconds"),
                "First to last token, for each token after the first.",
                ("model",),
                buckets=_TPOT_BUCKETS,
                registry=registry,
            ).labels
        )
        self._duration = cache(
            Histogram(
                name("e2e_request_latency_seconds"),
                "From arrival to the last token.",
                ("model",),
                buckets=_E2E_BUCKETS,
                registry=registry,
            ).labels
        )
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

    def observe_store_failure(self, store: str, kind: str) -> None:
        """Counts a call that the store of access (``database`` or ``limits``) did not answer as it should."""
        self._store_failures.labels(store, kind).inc()

    def observe_refusal(self, reason: str) -> None:
        """Counts a request that access refused; reasons are a few words."""
        self._refusals.labels(reason).inc()

    def observe(self, run: Run) -> None:
        """Counts a run that has ended."""
        model = run.request.model
        self._requests(model, run.outcome).inc()
        self._attempts(model).inc(run.attempt)
        self._prompt_tokens(model).inc(run.request.num_prompt_tokens)
        self._tokens(model).inc(run.num_completion_tokens)
        self._overrun(model).inc(run.num_overrun)
        for stage, seconds in run.stages.stages():
            self._stage(model, stage).inc(seconds)
        if run.ttft_s is None or not run.is_over:
            return
        duration_s = run.stages.total_s()
        self._ttft(model).observe(run.ttft_s)
        self._duration(model).observe(duration_s)
        if run.num_completion_tokens > 1:
            self._tpot(model).observe((duration_s - run.ttft_s) / (run.num_completion_tokens - 1))
