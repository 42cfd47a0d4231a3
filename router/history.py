"""The last quarter of an hour in numbers, for charts: one sample of the whole cell every few seconds.

Rates are differences of the counters that workers report, by incarnation: who died takes its counters along, who is new
begins at zero, and neither makes a rate negative.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from core.clock import Clock
from core.ids import Incarnation, WorkerId
from core.types import ClusterSample, FinishReason, RequestRecord, Role, WorkerState, WorkerStatus

SAMPLE_S = 2.0
MAX_SAMPLES = 450
_ANSWERS = frozenset(str(reason) for reason in FinishReason)
_HERE = (WorkerState.READY, WorkerState.DRAINING, WorkerState.SUSPECT)


@dataclass(frozen=True, slots=True)
class _Totals:
    prompt_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0


class History:
    """Samples by their number; ``num_samples`` counts all that ever were."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, ClusterSample]] = deque(maxlen=MAX_SAMPLES)
        self._totals: dict[tuple[WorkerId, Incarnation], _Totals] = {}
        self._ended: list[RequestRecord] = []
        self._began_at = clock.now()
        self.num_samples = 0

    def end(self, records: Iterable[RequestRecord]) -> None:
        """Requests have ended."""
        self._ended.extend(records)

    def tick(self, workers: Sequence[WorkerStatus], num_waiting: int) -> bool:
        """Takes a sample when it is time to: true if it did. ``num_waiting`` are those at the router."""
        now = self._clock.now()
        duration_s = now - self._began_at
        if duration_s < SAMPLE_S:
            return False
        more = self._difference(workers)
        alive = [worker for worker in workers if worker.state in _HERE]
        sample = ClusterSample(
            age_s=0.0,
            duration_s=duration_s,
            num_running=sum(w.load.num_running for w in alive if w.registration.role is not Role.PREFILL),
            num_waiting=num_waiting + sum(w.load.num_waiting for w in alive),
            prompt_tokens_per_s=more.prompt_tokens / duration_s,
            tokens_per_s=more.tokens / duration_s,
            kv_bytes_per_s=more.kv_bytes / duration_s,
        )
        self._samples.append((now, _with_latencies(sample, self._ended)))
        self._ended = []
        self._began_at = now
        self.num_samples += 1
        return True

    def since(self, number: int) -> tuple[ClusterSample, ...]:
        """The samples behind the first ``number``, oldest first."""
        now = self._clock.now()
        num_new = min(self.num_samples - number, len(self._samples))
        first = len(self._samples) - num_new
        return tuple(replace(sample, age_s=now - at) for at, sample in list(self._samples)[first:])

    def _difference(self, workers: Iterable[WorkerStatus]) -> _Totals:
        """What was added to the counters since the last time."""
        before, self._totals = self._totals, {}
        prompt_tokens = tokens = kv_bytes = 0
        for worker in workers:
            load, key = worker.load, (worker.registration.worker_id, worker.registration.incarnation)
            received = sum(num_bytes for _, num_bytes in load.kv_bytes_received)
            now = _Totals(load.prompt_tokens_computed, load.tokens_generated, received)
            self._totals[key] = now
            old = before.get(key, _Totals())
            prompt_tokens += now.prompt_tokens - old.prompt_tokens
            tokens += now.tokens - old.tokens
            kv_bytes += now.kv_bytes - old.kv_bytes
        return _Totals(max(prompt_tokens, 0), max(tokens, 0), max(kv_bytes, 0))


def _with_latencies(sample: ClusterSample, ended: Sequence[RequestRecord]) -> ClusterSample:
    ttfts = sorted(record.ttft_s for record in ended if record.ttft_s > 0)
    gaps = sorted(
        (record.duration_s - record.ttft_s) / (record.num_completion_tokens - 1)
        for record in ended
        if record.ttft_s > 0 and record.num_completion_tokens > 1
    )
    return replace(
        sample,
        num_ended=len(ended),
        num_failed=sum(record.outcome not in _ANSWERS for record in ended),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p95_s=quantile(ttfts, 0.95),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p95_s=quantile(gaps, 0.95),
    )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None
