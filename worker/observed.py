"""Histograms of a worker: what is observed as it happens. Everything else is asked for when it is scraped.

Nothing here is done for each token: the gaps between tokens of a step are one gap, counted as often as it was waited
for.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from core.telemetry import METRIC_PREFIX

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TRANSFER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SIZE_BUCKETS = tuple(float(1 << shift) for shift in range(14, 36, 2))
"""16 KiB to 16 GiB."""
_HOLD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30)


class WeightedHistogram(Collector):
    """A histogram in which one value may count many times, at the cost of one."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        place = 0
        for bound in self._bounds:
            if value <= bound:
                break
            place += 1
        self._counts[place] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets, total = [], 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class Observed:
    """Of one worker. Event loop only."""

    def __init__(self, own: Mapping[str, str], registry: CollectorRegistry | None = None) -> None:
        """``own`` are the labels of the worker. Without a registry nobody reads it."""

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"{METRIC_PREFIX}_{name}", text, tuple(own), buckets=buckets, registry=registry)
            return made.labels(**own) if own else made

        self._step_s = histogram("step_seconds", "Seconds of one step", _STEP_BUCKETS)
        self._batch = histogram("batch_size", "Sequences that a step made a token for", _BATCH_BUCKETS)
        self._transfer_s = histogram(
            "kv_transfer_duration_seconds", "From the grant until the blocks could be used", _TRANSFER_BUCKETS
        )
        self._transfer_bytes = histogram("kv_transfer_size_bytes", "Bytes of one hand-off", _SIZE_BUCKETS)
        self._hold_s = histogram("kv_hold_seconds", "How long blocks were held for a decode worker", _HOLD_BUCKETS)
        self._gaps = WeightedHistogram(
            f"{METRIC_PREFIX}_inter_token_latency_seconds", "Between two tokens of a choice", own, _GAP_BUCKETS
        )
        if registry is not None:
            registry.register(self._gaps)
        self._last_step: tuple[float, int] | None = None

    def step(self, seconds: float, *, num_tokens: int, num_firsts: int, ended_at: float) -> None:
        """``num_tokens`` sequences have a new token, of which ``num_firsts`` had none before. The others have waited
        since the step before, but for those that were preempted: their gap is counted as that of the others."""
        self._step_s.observe(seconds)
        if not num_tokens:
            return
        self._batch.observe(num_tokens)
        if self._last_step is not None and num_tokens > num_firsts:
            self._gaps.observe(ended_at - self._last_step[0], num_tokens - num_firsts)
        self._last_step = (ended_at, num_tokens)

    def transfer(self, seconds: float, num_bytes: int) -> None:
        self._transfer_s.observe(seconds)
        self._transfer_bytes.observe(num_bytes)

    def hold(self, seconds: float) -> None:
        self._hold_s.observe(seconds)
