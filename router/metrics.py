"""What the router counts. One set for each router, in its own registry."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.errors import ERRORS_BY_SLUG, ContextTooLong, DeadlineExceeded, NoWorker, QueueFull
from core.telemetry import METRIC_PREFIX
from core.types import Mode, Role, WorkerState, WorkerStatus
from router.policy import FALLBACKS, Reason

_WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


class RouterMetrics:
    """Names and labels are listed in docs/operations; series of known pools exist from the start, at zero."""

    def __init__(self, registry: CollectorRegistry, pools: Iterable[tuple[str, Role]]) -> None:
        def name(text: str) -> str:
            return f"{METRIC_PREFIX}_router_{text}"

        self.placements = Counter(name("placements"), "Requests placed", ["model", "mode", "reason"], registry=registry)
        self.fallbacks = Counter(
            name("fallbacks"),
            "Requests that a decode worker prefilled itself because no prefill worker could, by reason",
            ["model", "reason"],
            registry=registry,
        )
        self.refusals = Counter(
            name("refusals"), "Requests not placed, by error slug", ["model", "reason"], registry=registry
        )
        self.ended = Counter(
            name("placements_ended"), "Placements whose end was reported, by outcome", ["outcome"], registry=registry
        )
        self.wait_s = Histogram(
            name("placement_wait_seconds"), "Time until placed or refused", buckets=_WAIT_BUCKETS, registry=registry
        )
        self.waiting = Gauge(name("waiting_requests"), "Requests waiting for a worker", registry=registry)
        self.queue_length = Gauge(
            name("queue_length"),
            "Requests waiting, by model and priority class",
            ["model", "priority"],
            registry=registry,
        )
        self.queue_wait_s = Histogram(
            name("queue_wait_seconds"),
            "Time that a request waited until it was placed",
            ["model", "priority"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.queue_refusals = Counter(
            name("queue_refusals"),
            "Requests that were refused room or a place in the queue",
            ["model", "priority", "reason"],
            registry=registry,
        )
        self.open_placements = Gauge(
            name("open_placements"), "Placements whose end was not reported yet", registry=registry
        )
        self.incarnations = Counter(
            name("worker_incarnations"), "Worker incarnations that joined", ["model", "role"], registry=registry
        )
        self.transitions = Counter(
            name("worker_transitions"), "Changes of a worker's state as judged", ["to"], registry=registry
        )
        self.workers = Gauge(
            name("workers"), "Workers by state as judged", ["model", "role", "state"], registry=registry
        )
        self.prefix_blocks = Gauge(
            name("prefix_blocks"), "Different KV blocks that workers hold or are about to", registry=registry
        )
        self.gateways = Gauge(name("gateways"), "Gateways that report", registry=registry)
        self.decisions = Counter(
            name("autoscaler_decisions"), "Decisions of the autoscaler", ["model", "action", "mode"], registry=registry
        )
        self.scaling = Gauge(
            name("autoscaler_workers"),
            "Sizes as the autoscaler sees them: current, desired, target",
            ["model", "role", "kind"],
            registry=registry,
        )
        self.pool_size = Gauge(
            name("pool_size"), "Workers that each pool is to have", ["model", "role"], registry=registry
        )
        self._pools = set(pools)
        self._begin()

    def _begin(self) -> None:
        """Series that a dashboard asks for are there before there is anything to count."""
        for model, role in self._pools:
            self.incarnations.labels(model, role)
        for model in {model for model, _ in self._pools}:
            for mode in Mode:
                for reason in Reason:
                    self.placements.labels(model, mode, reason)
            for reason in FALLBACKS:
                self.fallbacks.labels(model, reason)
            for slug in (NoWorker.slug, QueueFull.slug, ContextTooLong.slug, DeadlineExceeded.slug):
                self.refusals.labels(model, slug)
        for outcome in ("ok", *ERRORS_BY_SLUG):
            self.ended.labels(outcome)
        for state in WorkerState:
            self.transitions.labels(state)

    def show_scaling(self, model: str, role: Role, *, current: int, desired: int, target: int | None) -> None:
        """``target``: what the size would be without guards; unchanged where nothing could be said."""
        self.scaling.labels(model, role, "current").set(current)
        self.scaling.labels(model, role, "desired").set(desired)
        if target is not None:
            self.scaling.labels(model, role, "target").set(target)

    def show_workers(self, workers: Iterable[WorkerStatus]) -> None:
        """Set the gauge of workers; states and pools without workers are zero."""
        counts: dict[tuple[str, Role, WorkerState], int] = {}
        for worker in workers:
            pool = (worker.registration.model.name, worker.registration.role)
            self._pools.add(pool)
            counts[*pool, worker.state] = counts.get((*pool, worker.state), 0) + 1
        for model, role in self._pools:
            for state in WorkerState:
                self.workers.labels(model, role, state).set(counts.get((model, role, state), 0))
