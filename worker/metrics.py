"""A worker's Prometheus metrics. Gauges are refreshed when asked for; nothing is locked on the step's path.

What is told of each pair is in worker/pair_metrics.py.
"""

from prometheus_client import Gauge, Histogram

from core.types import WorkerLoad
from engine.engine import StepResult
from kvtransfer.lease import LeaseTable
from kvtransfer.quarantine import QuarantineWatch
from kvtransfer.transfer_thread import TransferThread
from worker.context import WorkerContext
from worker.pair_metrics import PairCollector

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class WorkerMetrics:
    """Series exist (at zero) from the start. Labels are model and role: bounded."""

    def __init__(
        self, context: WorkerContext, transfers: TransferThread, leases: LeaseTable, quarantine: QuarantineWatch
    ) -> None:
        self._clock = context.clock
        self._quarantine = quarantine
        self._engine = context.engine
        self._transfers = transfers
        self._leases = leases
        registry = context.telemetry.registry
        own = {"model": context.model.name, "role": str(context.role)}
        names = tuple(own)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"baton_{name}", text, (*names, *labels), registry=registry)

        self._own = own
        self._blocks = gauge("kv_blocks", "KV blocks by kind", "kind")
        self._touched = gauge("kv_prefault_bytes", "KV memory that was touched before use")
        self._running = gauge("requests_running", "Sequences in the batch")
        self._waiting = gauge("requests_waiting", "Requests waiting in this worker")
        self._received = gauge("kv_received_bytes", "KV bytes read from prefill workers since start", "backend")
        self._sent = gauge("kv_sent_bytes", "KV bytes of hand-offs that were released as ok since start", "backend")
        self._transfer_counts = gauge("kv_transfers", "Transfers by outcome since start", "outcome")
        self._lease_counts = gauge("kv_leases", "Leases by end since start", "outcome")
        self._held = gauge("kv_held_bytes", "Bytes held for decode workers")
        self._quarantined = gauge(
            "kv_quarantine_blocks", "Blocks of ended requests to which a transfer may still write"
        )
        self._quarantine_age = gauge("kv_quarantine_age_seconds", "Age of the oldest quarantined transfer")
        self._alarms = gauge("kv_quarantine_alarms", "Alarms on a quarantine that does not drain since start")
        self._prompt_tokens = gauge("prompt_tokens_computed", "Prompt tokens computed since start")
        self._prompt_tokens_refetched = gauge(
            "prompt_tokens_refetched", "Prompt tokens of hand-offs that were taken by a later claim than the first"
        )
        self._prompt_tokens_cached = gauge("prompt_tokens_cached", "Prompt tokens found in the cache since start")
        self._preemptions = gauge("preemptions", "Sequences that gave their blocks back and started over since start")
        self._generated = gauge("tokens_generated", "Tokens generated since start")
        self._step_s = Histogram(
            "baton_step_seconds", "Seconds of one step", names, buckets=_STEP_BUCKETS, registry=registry
        ).labels(**own)
        is_mock = gauge("mock_execution", "1 where no model is run and answers are made up")
        is_mock.labels(**own).set(context.engine.limits.is_mock)
        registry.register(PairCollector(own, context.pairs, transfers))

    def observe_step(self, result: StepResult, seconds: float) -> None:
        self._step_s.observe(seconds)

    def refresh(self, load: WorkerLoad) -> None:
        """Bring the gauges up to date."""
        blocks = load.blocks
        for kind in ("custody", "in_use", "leased", "cached", "free", "reserved"):
            self._blocks.labels(**self._own, kind=kind).set(getattr(blocks, kind))
        prefault = self._engine.cache.prefault
        self._touched.labels(**self._own).set(0 if prefault is None else prefault.touched_bytes)
        self._running.labels(**self._own).set(load.num_running)
        self._waiting.labels(**self._own).set(load.num_waiting)
        for backend, num_bytes in load.kv_bytes_received:
            self._received.labels(**self._own, backend=backend).set(num_bytes)
        for backend, num_bytes in load.kv_bytes_sent:
            self._sent.labels(**self._own, backend=backend).set(num_bytes)
        for ended, count in self._transfers.stats().transfers:
            self._transfer_counts.labels(**self._own, outcome=str(ended)).set(count)
        stats = self._leases.stats()
        for outcome in ("opened", "refused", "released", "expired", "revoked"):
            self._lease_counts.labels(**self._own, outcome=outcome).set(getattr(stats, outcome))
        self._held.labels(**self._own).set(load.held_bytes)
        custody = self._transfers.custody()
        since = custody.oldest_quarantine_at
        self._quarantined.labels(**self._own).set(custody.num_quarantined_blocks)
        self._quarantine_age.labels(**self._own).set(0.0 if since is None else self._clock.now() - since)
        self._alarms.labels(**self._own).set(self._quarantine.num_alarms)
        self._prompt_tokens.labels(**self._own).set(load.prompt_tokens_computed)
        self._prompt_tokens_refetched.labels(**self._own).set(load.prompt_tokens_refetched)
        self._generated.labels(**self._own).set(load.tokens_generated)
        counters = self._engine.counters()
        self._prompt_tokens_cached.labels(**self._own).set(counters.prompt_tokens_cached)
        self._preemptions.labels(**self._own).set(counters.num_preemptions)
