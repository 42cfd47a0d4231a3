"""A worker's Prometheus metrics: asked for when they are scraped, so nothing is locked on the step's path.

Series exist, at zero, from the start, and all labels are of closed sets: model, role, kinds, outcomes, backends. What
is told of each pair is in worker/pair_metrics.py, histograms in worker/observed.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.telemetry import METRIC_PREFIX
from core.types import WorkerLoad
from kvtransfer.lease import LeaseTable
from kvtransfer.quarantine import QuarantineWatch
from kvtransfer.transfer_thread import TransferThread
from worker.context import WorkerContext
from worker.pair_metrics import PairCollector

Rows = Iterable[tuple[Sequence[str], float]]
BLOCK_KINDS = ("custody", "in_use", "leased", "cached", "free", "reserved")
LEASE_ENDS = ("opened", "refused", "released", "expired", "revoked")


class WorkerMetrics(Collector):
    """Gauges of work return to zero when there is none. Others are said to be facts."""

    def __init__(
        self, context: WorkerContext, transfers: TransferThread, leases: LeaseTable, quarantine: QuarantineWatch
    ) -> None:
        self._context = context
        self._transfers = transfers
        self._leases = leases
        self._quarantine = quarantine
        self._own = {"model": context.model.name, "role": str(context.role)}
        self._load: WorkerLoad | None = None
        registry = context.telemetry.registry
        registry.register(self)
        registry.register(PairCollector(self._own, context.pairs, transfers))

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked at registration: the transfers are not running yet."""
        return ()

    def refresh(self, load: WorkerLoad) -> None:
        """What is told from now on."""
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load
        if load is None:
            return
        yield from self._work(load)
        yield from self._memory(load)
        yield from self._moved(load)
        yield from self._aliases(load)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _work(self, load: WorkerLoad) -> Iterator[Metric]:
        context, counters = self._context, self._context.engine.counters()
        yield self._gauge("requests_running", "Sequences in the batch", load.num_running)
        yield self._gauge("requests_waiting", "Requests waiting in this worker", load.num_waiting)
        yield self._gauge("prefill_queue_tokens", "Prompt tokens that wait to be computed", load.queued_prompt_tokens)
        yield self._counter("prompt_tokens_computed", "Prompt tokens computed", load.prompt_tokens_computed)
        yield self._counter(
            "prompt_tokens_refetched",
            "Prompt tokens of hand-offs that were taken by a later claim than the first",
            load.prompt_tokens_refetched,
        )
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the cache", counters.prompt_tokens_cached)
        yield self._counter("tokens_generated", "Tokens generated", load.tokens_generated)
        yield self._counter(
            "preemptions", "Sequences that gave their blocks back and started over", counters.num_preemptions
        )
        yield self._counter("steps", "Steps", load.num_steps)
        yield self._counter("busy_seconds", "Seconds spent in steps", load.busy_s)
        ends = (((outcome,), count) for outcome, count in context.attempts_ended.items())
        yield self._counters("attempts_ended", "Attempts at this worker that are over, by outcome", ("outcome",), ends)
        yield self._gauge(
            "mock_execution", "1 where no model is run and answers are made up", context.engine.limits.is_mock
        )

    # -- memory -------------------------------------------------------------------------------------------------------

    def _memory(self, load: WorkerLoad) -> Iterator[Metric]:
        blocks, block_bytes = load.blocks, self._context.geometry.block_bytes
        kinds = [((kind,), getattr(blocks, kind)) for kind in BLOCK_KINDS]
        yield self._gauges("kv_blocks", "KV blocks by kind", ("kind",), kinds)
        sizes = ((kind, number * block_bytes) for kind, number in kinds)
        yield self._gauges("kv_cache_bytes", "Bytes of KV blocks by kind", ("kind",), sizes)
        yield self._gauge("kv_cache_capacity_bytes", "Bytes of all KV blocks", blocks.total * block_bytes)
        promised = blocks.custody + blocks.in_use + blocks.leased + blocks.reserved
        yield self._gauge(
            "kv_projected_ratio", "Share of the blocks that are in use or promised", promised / max(1, blocks.total)
        )
        prefault = self._context.engine.cache.prefault
        touched = 0 if prefault is None else prefault.touched_bytes
        yield self._gauge("kv_prefault_bytes", "KV memory that was touched before use", touched)
        custody = self._transfers.custody()
        yield self._gauge(
            "kv_quarantine_blocks",
            "Blocks of ended requests to which a transfer may still write",
            custody.num_quarantined_blocks,
        )
        since = custody.oldest_quarantine_at
        age_s = 0.0 if since is None else self._context.clock.now() - since
        yield self._gauge("kv_quarantine_age_seconds", "Age of the oldest quarantined transfer", age_s)
        yield self._counter(
            "kv_quarantine_alarms", "Alarms on a quarantine that does not drain", self._quarantine.num_alarms
        )

    # -- hand-offs ----------------------------------------------------------------------------------------------------

    def _moved(self, load: WorkerLoad) -> Iterator[Metric]:
        stats, leases = self._transfers.stats(), self._leases.stats()
        yield self._gauge("kv_transfers_in_flight", "Transfers under way", load.num_transfers)
        yield self._gauge("kv_held_bytes", "Bytes held for decode workers", load.held_bytes)
        yield self._gauge("kv_leases_live", "Leases that have not ended", leases.num_live)
        received = (((backend,), num_bytes) for backend, num_bytes in stats.bytes_received)
        yield self._counters("kv_received_bytes", "KV bytes read from prefill workers", ("backend",), received)
        sent = (((backend,), num_bytes) for backend, num_bytes in load.kv_bytes_sent)
        yield self._counters("kv_sent_bytes", "KV bytes of hand-offs that were released as ok", ("backend",), sent)
        ended = (((str(outcome),), count) for outcome, count in stats.transfers)
        yield self._counters("kv_transfers", "Transfers by outcome", ("outcome",), ended)
        ends = (((name,), getattr(leases, name)) for name in LEASE_ENDS)
        yield self._counters("kv_leases", "Leases by what became of them", ("outcome",), ends)
        shakes = ((("ok",), stats.connects - stats.connects_failed), (("failed",), stats.connects_failed))
        yield self._counters("kv_handshakes", "Handshakes with prefill workers", ("outcome",), shakes)

    # -- names that others look for -----------------------------------------------------------------------------------

    def _aliases(self, load: WorkerLoad) -> Iterator[Metric]:
        """As vLLM names them: routers and dashboards read them."""
        blocks = load.blocks
        used = (blocks.total - blocks.free - blocks.cached) / max(1, blocks.total)
        own = {"model_name": self._own["model"], "engine": "0"}
        for name, text, value in (
            ("num_requests_running", "Sequences in the batch", load.num_running),
            ("num_requests_waiting", "Requests waiting in this worker", load.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", used),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(own))
            family.add_metric(list(own.values()), value)
            yield family

    # -- families -----------------------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), [((), value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), [((), value)])

    def _gauges(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        return _filled(
            GaugeMetricFamily(f"{METRIC_PREFIX}_{name}", text, labels=[*self._own, *labels]), self._own, rows
        )

    def _counters(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        family = CounterMetricFamily(f"{METRIC_PREFIX}_{name}", text, labels=[*self._own, *labels])
        return _filled(family, self._own, rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, own: Mapping[str, str], rows: Rows) -> Metric:
    for values, number in rows:
        family.add_metric([*own.values(), *values], number)
    return family
