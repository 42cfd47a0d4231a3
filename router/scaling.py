"""The shell around the autoscaler: observes a model, decides, tells everybody, and in mode ``act`` does it."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.clock import Clock
from core.config import AutoscaleConfig, ModelConfigSection
from core.errors import InvalidRequest
from core.types import PlaceRequest, PoolSize, Role, ScalingStatus, WorkerState, WorkerStatus
from router.autoscaler import Action, Decision, Observation, PoolFacts, Rates, decide
from router.costs import Costs
from router.load import address_of
from router.metrics import RouterMetrics
from router.pools import PoolBook

log = logging.getLogger(__name__)

DEFAULT_PROMPT_TOKENS = 256
"""Length of a prompt, as long as none has come."""
MAX_GROWTH = 2.0
"""Demand is projected to at most so many times what it was in the later half of its window."""


@dataclass(slots=True)
class _Second:
    """What arrived in one second."""

    at: float
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Demand:
    """Prompts of one model: what arrived lately, and what waits for a place now."""

    begun_at: float
    seconds: deque[_Second] = field(default_factory=deque)
    num_waiting: int = 0
    waiting_tokens: int = 0

    def note(self, now: float, num_tokens: int) -> None:
        if not self.seconds or now >= self.seconds[-1].at + 1.0:
            self.seconds.append(_Second(at=now))
        self.seconds[-1].num_requests += 1
        self.seconds[-1].num_tokens += num_tokens

    @contextmanager
    def waiting(self, num_tokens: int) -> Iterator[None]:
        """While a request has no place."""
        self.num_waiting += 1
        self.waiting_tokens += num_tokens
        try:
            yield
        finally:
            self.num_waiting -= 1
            self.waiting_tokens -= num_tokens

    def mean_tokens(self) -> float:
        """Of a prompt; of those of the window."""
        num_requests = sum(one.num_requests for one in self.seconds)
        return sum(one.num_tokens for one in self.seconds) / num_requests if num_requests else DEFAULT_PROMPT_TOKENS

    def tokens_per_s(self, now: float, *, window_s: float, ahead_s: float) -> float:
        """What arrives in a second, as projected ``ahead_s`` from now along the window's trend if it rises; of falling
        demand the mean. Forgets what is older than the window."""
        while self.seconds and self.seconds[0].at < now - window_s:
            self.seconds.popleft()
        half_s = max(1.0, min(window_s, now - self.begun_at)) / 2
        older = sum(one.num_tokens for one in self.seconds if one.at < now - half_s) / half_s
        later = sum(one.num_tokens for one in self.seconds if one.at >= now - half_s) / half_s
        mean, slope = (older + later) / 2, (later - older) / half_s
        return max(mean, min(mean + slope * (half_s + ahead_s), MAX_GROWTH * later))


class Autoscaler:
    """All models of a cell. ``tick`` often; each model is looked at every ``interval_s``."""

    def __init__(
        self,
        models: Iterable[ModelConfigSection],
        *,
        clock: Clock,
        pools: PoolBook,
        metrics: RouterMetrics,
        scale: Callable[[Sequence[PoolSize]], object],
        flip: Callable[[str], object],
    ) -> None:
        """``scale`` and ``flip`` (a worker) carry a decision out; they may raise InvalidRequest."""
        self._clock = clock
        self._pools = pools
        self._metrics = metrics
        self._scale = scale
        self._flip = flip
        self._models = {model.name: (model.autoscale, tuple(model.pools)) for model in models}
        now = clock.now()
        self._demand = {name: Demand(begun_at=now) for name in self._models}
        self._history: dict[str, deque[Decision]] = {name: deque() for name in self._models}

    @contextmanager
    def placing(self, request: PlaceRequest) -> Iterator[Callable[[int], None]]:
        """Around the placing of a request. Call what is given with the tokens that need not be computed."""
        demand, num_tokens = self._demand.get(request.model), request.num_prompt_tokens
        if demand is None:
            yield lambda num_cached: None
            return
        now, num_cached_tokens = self._clock.now(), 0

        def place(num_cached: int) -> None:
            nonlocal num_cached_tokens
            num_cached_tokens = num_cached

        try:
            with demand.waiting(num_tokens):
                yield place
        finally:
            if request.attempt == 1:
                demand.note(max(now, self._clock.now()), max(0, num_tokens - num_cached_tokens))

    def tick(self, workers: Sequence[WorkerStatus], costs: Callable[[], Costs]) -> None:
        """Decide for every model whose time has come."""
        now = self._clock.now()
        for model, (settings, roles) in self._models.items():
            history = self._history[model]
            if settings.mode == "off" or (history and now < history[-1].at + settings.interval_s):
                continue
            mine = [w for w in workers if w.registration.model.name == model]
            seen = self._observe(model, settings, roles, mine, costs())
            decision = decide(seen, settings, history)
            self._remember(history, decision, settings)
            self._tell(model, settings, decision, seen)
            if settings.mode == "act" and decision.action is not Action.HOLD:
                self._carry_out(model, decision, mine)

    def statuses(self) -> tuple[ScalingStatus, ...]:
        """The last decision about each model."""
        now = self._clock.now()
        return tuple(
            ScalingStatus(
                model=model,
                mode=self._models[model][0].mode,
                action=last.action,
                reason=last.reason,
                targets=tuple(
                    PoolSize(model=model, role=role, replicas=target, age_s=now - last.at)
                    for role, target in last.targets
                ),
                needs=tuple((role, need) for role, need in last.needs),
            )
            for model, history in self._history.items()
            for last in list(history)[-1:]
        )

    # -- one model ----------------------------------------------------------------------------------------------------

    def _observe(
        self, model: str, settings: AutoscaleConfig, roles: Iterable[Role], workers: list[WorkerStatus], costs: Costs
    ) -> Observation:
        now, demand = self._clock.now(), self._demand[model]
        return Observation(
            at=now,
            prompt_tokens_per_s=demand.tokens_per_s(now, window_s=settings.window_s, ahead_s=settings.start_s),
            num_waiting=demand.num_waiting,
            waiting_tokens=demand.waiting_tokens,
            pools=tuple((role, self._facts(model, role, workers)) for role in roles),
            rates=_rates(model, settings, workers, costs, demand.mean_tokens()),
        )

    def _facts(self, model: str, role: Role, workers: list[WorkerStatus]) -> PoolFacts:
        here = [w for w in workers if w.registration.role is role]
        held = [w.load.held_bytes / max(1, w.registration.num_blocks * w.registration.block_bytes) for w in here]
        return PoolFacts(
            desired=self._pools.desired(model, role),
            ready=sum(w.state is WorkerState.READY for w in here),
            num_unready=sum(w.state not in (WorkerState.READY, WorkerState.DRAINING) for w in here),
            num_draining=sum(w.state is WorkerState.DRAINING for w in here),
            problem=self._pools.problem(model, role),
            queued_tokens=sum(w.load.queued_prompt_tokens for w in here),
            num_requests=sum(w.load.num_running + w.load.num_waiting for w in here),
            used_blocks=sum(w.load.blocks.in_use + w.load.blocks.custody for w in here),
            held_share=sum(held) / len(held) if held else 0.0,
        )

    def _remember(self, history: "deque[Decision]", decision: Decision, settings: AutoscaleConfig) -> None:
        history.append(decision)
        keep_s = max(settings.down_stable_s, settings.down_cooldown_s, settings.up_cooldown_s) + 2 * settings.interval_s
        while history[0].at < decision.at - keep_s:
            history.popleft()

    def _tell(self, model: str, settings: AutoscaleConfig, decision: Decision, seen: Observation) -> None:
        targets = dict(decision.targets)
        for role, facts in seen.pools:
            self._metrics.show_scaling(
                model, role, current=facts.ready, desired=facts.desired, target=targets.get(role)
            )
        self._metrics.decisions.labels(model, decision.action, settings.mode).inc()
        if decision.action is Action.HOLD:
            return
        log.info(
            "autoscaler",
            extra={
                "model": model,
                "mode": settings.mode,
                "action": decision.action,
                "reason": decision.reason,
                "steps": {str(role): step for role, step in decision.steps},
                "targets": {str(role): target for role, target in decision.targets},
                "needs": {str(role): round(need, 3) for role, need in decision.needs},
                "prompt_tokens_per_s": round(seen.prompt_tokens_per_s, 1),
                "rates": str(seen.rates),
                "pools": {str(role): str(facts) for role, facts in seen.pools},
            },
        )

    def _carry_out(self, model: str, decision: Decision, workers: list[WorkerStatus]) -> None:
        try:
            if decision.action is Action.FLIP:
                mine = [
                    w for w in workers if w.state is WorkerState.READY and w.registration.role is decision.flip_from
                ]
                idlest = min(mine, key=lambda w: (w.load.num_running + w.load.num_waiting, w.load.blocks.cached))
                self._flip(idlest.registration.worker_id)
                return
            self._scale(
                [
                    PoolSize(model=model, role=role, replicas=self._pools.desired(model, role) + step)
                    for role, step in decision.steps
                ]
            )
        except InvalidRequest as error:
            log.warning("the autoscaler could not do it", extra={"model": model, "why": error.message})


def _rates(
    model: str, settings: AutoscaleConfig, workers: list[WorkerStatus], costs: Costs, prompt_tokens: float
) -> Rates | None:
    """What workers of the model do, from what was learned; of several, the mean."""
    ready = [w for w in workers if w.state is WorkerState.READY]
    readers = [w for w in ready if w.registration.role is not Role.DECODE]
    writers = [w for w in ready if w.registration.role is not Role.PREFILL]
    if model not in costs.measured or not readers or not writers:
        return None
    length = max(1, round(prompt_tokens))
    return Rates(
        prefill_tokens_per_s=sum(length / _prompt_s(costs, w, length) for w in readers) / len(readers),
        batch=sum(_batch(costs, w, settings.tpot_s, prompt_tokens) for w in writers) / len(writers),
        num_blocks=min(w.registration.num_blocks for w in writers),
    )


def _prompt_s(costs: Costs, worker: WorkerStatus, length: int) -> float:
    return max(1e-9, costs.prefill_s(address_of(worker), length))


def _batch(costs: Costs, worker: WorkerStatus, tpot_s: float, prompt_tokens: float) -> float:
    """The most answers, of as much context as there is now, whose step is within ``tpot_s``."""
    registration, load = worker.registration, worker.load
    block_size = registration.model.block_size
    context = load.blocks.in_use * block_size / load.num_running if load.num_running else prompt_tokens
    law = costs.of(address_of(worker))
    each_s = law.decode_row_s + law.decode_position_s * context
    most = (tpot_s - law.fixed_s) / each_s if each_s > 0 else math.inf
    return max(1.0, min(most, float(registration.max_sequences)))
