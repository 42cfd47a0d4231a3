"""What /metrics tells of each pair that this worker is one side of. Made when asked for, from what the pairs remember.

The label ``peer`` is a worker id, bounded by ``kvtransfer.pairs``; the others are ``other``. All other labels are of
closed sets.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.errors import ERRORS_BY_SLUG, TransferError
from core.telemetry import METRIC_PREFIX
from kvtransfer.circuit import CircuitState
from kvtransfer.pairs import Pairs
from kvtransfer.transfer_thread import TransferThread

_SLUGS = frozenset(slug for slug, error in ERRORS_BY_SLUG.items() if issubclass(error, TransferError))
Row = tuple[Sequence[str], float]
"""Label values behind model and role, and the value."""


class PairCollector(Collector):
    """Asked on the event loop, which circuits belong to."""

    def __init__(self, own: dict[str, str], pairs: Pairs, transfers: TransferThread) -> None:
        """``own`` are the labels of the worker."""
        self._own = own
        self._pairs = pairs
        self._transfers = transfers

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked at registration: the transfers are not running yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        counts = self._pairs.counts()
        for name, text, field in (
            (
                "bytes",
                "KV bytes moved: arrived at a decode worker, released as arrived at a prefill worker",
                "num_bytes",
            ),
            ("operations", "Operations that are over, reads of lease slots included", "num_ops"),
            (
                "descriptors",
                "Descriptors of those operations, neighbours merged, where the backend tells",
                "num_descriptors",
            ),
            ("post_seconds", "Seconds spent in posting; where posting is the copy, all of it", "post_s"),
            ("move_seconds", "Seconds from posting until the operation was seen to be over", "move_s"),
            ("handoffs", "Hand-offs begun", "num_handoffs"),
            ("retries", "Hand-offs begun for requests that had failed before", "num_retries"),
        ):
            yield self._counter(name, text, (), (((peer,), getattr(each, field)) for peer, each in counts.items()))
        # At zero from the start: else the first failure of its kind is no increase, and no rate shows it.
        failures = (
            ((peer, slug), each.failures[slug])
            for peer, each in counts.items()
            for slug in sorted({*_SLUGS, *each.failures})
        )
        yield self._counter("failures", "Hand-offs that failed by the fault of the pair", ("slug",), failures)
        circuits = self._pairs.circuits().items()
        states = (
            ((peer, state), float(circuit.state is state)) for peer, circuit in circuits for state in CircuitState
        )
        yield self._gauge("circuit", "1 for the state of the pair's circuit", ("state",), states)
        openings = (((peer,), circuit.num_openings) for peer, circuit in circuits)
        yield self._counter("circuit_openings", "How often this start of the peer was left alone", (), openings)
        yield from self._links()

    def _links(self) -> Iterator[Metric]:
        links = [(peer, report, link) for peer, report in self._transfers.reports().items() for link in report.links]
        names = ("backend", "mode")
        rates = (((peer, link.backend, link.mode), link.bytes_per_s) for peer, _, link in links)
        yield self._gauge("bytes_per_second", "As measured by the last handshake; 0 where a link failed", names, rates)
        memcpy = {(peer,): link.memcpy_bytes_per_s for peer, report, link in links if link is report.chosen}
        yield self._gauge("memcpy_bytes_per_second", "A memcpy of the same bytes at that time", (), memcpy.items())
        latency = (((peer, link.backend, link.mode), link.latency_s) for peer, _, link in links)
        yield self._gauge("latency_seconds", "The fastest read of 64 bytes", names, latency)
        used = (((peer, link.backend, link.mode), float(link is report.chosen)) for peer, report, link in links)
        yield self._gauge("link_used", "1 for the link that hand-offs take", names, used)

    def _counter(self, name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
        return self._fill(CounterMetricFamily(_name(name), text, labels=self._labels(labels)), rows)

    def _gauge(self, name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
        return self._fill(GaugeMetricFamily(_name(name), text, labels=self._labels(labels)), rows)

    def _labels(self, labels: Sequence[str]) -> list[str]:
        return [*self._own, "peer", *labels]

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily, rows: Iterable[Row]) -> Metric:
        for values, number in rows:
            family.add_metric([*self._own.values(), *map(str, values)], number)
        return family


def _name(name: str) -> str:
    return f"{METRIC_PREFIX}_kv_pair_{name}"
