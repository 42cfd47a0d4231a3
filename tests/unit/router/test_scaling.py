"""What the autoscaler's shell sees, tells and does; its decisions are tested in test_autoscaler.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.config import parse_config
from core.errors import InvalidRequest, NoWorker
from core.ids import Incarnation, WorkerId
from core.types import PoolSize, Role, WorkerState, WorkerStatus
from router.costs import Costs, StepLaw
from router.metrics import RouterMetrics
from router.pools import PoolBook
from router.scaling import Autoscaler, Demand
from tests.unit.router.builders import MODEL, make_load, make_registration, make_request

LAW = StepLaw(fixed_s=0.0, decode_row_s=0.01, decode_position_s=0.0, prompt_token_s=0.001, prompt_pair_s=0.0)
"""1000 prompt tokens a second; 10 answers within the TPOT of 0.1 s, but a worker has 8 places."""
NAMES = (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
COSTS = Costs(steps={(WorkerId(name), Incarnation(1)): LAW for name, _ in NAMES}, measured=frozenset({MODEL}))


class Shell:
    def __init__(self, **autoscale: object) -> None:
        settings = {"up_stable_s": 0, **autoscale}
        pools = {"prefill": {}, "decode": {"replicas": 2}}
        config = parse_config({"models": [{"name": MODEL, "path": "x", "autoscale": settings, "pools": pools}]})
        self.clock = ManualClock(100.0)
        self.registry = CollectorRegistry()
        self.pools = PoolBook(self.clock, config.models)
        self.flipped: list[str] = []
        self.refusal: InvalidRequest | None = None
        metrics = RouterMetrics(self.registry, [])
        self.scaler = Autoscaler(
            config.models,
            clock=self.clock,
            pools=self.pools,
            metrics=metrics,
            scale=self.scale,
            flip=self.flipped.append,
        )

    def scale(self, sizes: Sequence[PoolSize]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.pools.scale(sizes)

    def tick(self, seconds: float = 5.0, **loads: dict[str, int]) -> None:
        self.clock.advance(seconds)
        workers = [
            WorkerStatus(
                registration=make_registration(name, role=role),
                load=make_load(**loads.get(name, {})),
                state=WorkerState.READY,
                heartbeat_age_s=0.0,
            )
            for name, role in NAMES
        ]
        self.scaler.tick(workers, lambda: COSTS)

    def arrive(self, num_requests: int, num_tokens: int, *, num_cached: int = 0) -> None:
        for _ in range(num_requests):
            with self.scaler.placing(make_request(num_prompt_tokens=num_tokens)) as placed:
                placed(num_cached)

    def desired(self) -> tuple[int, int]:
        return self.pools.desired(MODEL, Role.PREFILL), self.pools.desired(MODEL, Role.DECODE)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"baton_router_autoscaler_{name}", {"model": MODEL, **labels})


def test_by_default_it_only_says_what_it_would_do(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    with caplog.at_level(logging.INFO):
        shell.arrive(10, 1000)
        shell.tick()
    assert shell.desired() == (1, 2)
    (event,) = [record for record in caplog.records if record.getMessage() == "autoscaler"]
    facts: dict[str, Any] = vars(event)
    assert (facts["mode"], facts["action"], facts["steps"]) == ("observe", "scale", {"prefill": 2})
    assert {"needs", "targets", "rates", "pools", "prompt_tokens_per_s", "reason"} <= facts.keys()
    (status,) = shell.scaler.statuses()
    assert (status.mode, status.action) == ("observe", "scale") and dict(status.needs)[Role.PREFILL] > 1
    assert (
        shell.metric("workers", role="prefill", kind="target")
        == dict((t.role, t.replicas) for t in status.targets)[Role.PREFILL]
    )
    assert shell.metric("decisions_total", action="scale", mode="observe") == 1


def test_acting_it_scales_and_a_refusal_ends_nothing() -> None:
    shell = Shell(mode="act")
    shell.arrive(10, 1000)
    shell.refusal = InvalidRequest("no")
    shell.tick()
    assert shell.desired() == (1, 2)
    shell.refusal = None
    shell.arrive(90, 1000)
    shell.tick(31.0)
    assert shell.desired()[0] > 1


def test_what_is_cached_needs_no_worker_and_neither_does_the_retry_of_what_came_before() -> None:
    shell = Shell(mode="act")
    shell.arrive(10, 1000, num_cached=950)
    for _ in range(10):
        with shell.scaler.placing(replace(make_request(num_prompt_tokens=1000), attempt=2)):
            pass
    shell.tick()
    assert shell.desired() == (1, 2)


def test_requests_that_wait_for_a_place_or_found_none_are_demand_too() -> None:
    shell = Shell(mode="act")
    with suppress(NoWorker), shell.scaler.placing(make_request(num_prompt_tokens=9000)):
        shell.tick()
        assert shell.desired()[0] > 1
        raise NoWorker("none")
    demand = shell.scaler._demand[MODEL]
    assert (demand.num_waiting, demand.waiting_tokens) == (0, 0)
    assert sum(one.num_tokens for one in demand.seconds) == 9000


def test_the_idlest_worker_is_flipped() -> None:
    shell = Shell(mode="act", down_stable_s=0)
    shell.arrive(10, 1000)
    shell.tick(d0={"num_running": 2}, d1={"num_running": 1})
    assert shell.flipped == ["d1"]


def test_a_model_that_nobody_has_measured_is_left_alone() -> None:
    shell = Shell(mode="act")
    shell.arrive(10, 1000)
    shell.clock.advance(5.0)
    shell.scaler.tick([], lambda: Costs())
    assert [one.reason for one in shell.scaler.statuses()] == ["missing"]
    assert shell.desired() == (1, 2)
    off = Shell(mode=False)
    off.tick()
    assert off.scaler.statuses() == ()


def test_rising_demand_is_projected_and_falling_demand_is_not() -> None:
    def rate(per_second: list[int]) -> float:
        demand = Demand(begun_at=0.0)
        for second, tokens in enumerate(per_second):
            demand.note(float(second), tokens)
        return demand.tokens_per_s(60.0, window_s=60.0, ahead_s=30.0)

    assert rate([100] * 60) == pytest.approx(100)
    assert rate(list(range(60))) == pytest.approx(89)  # 59 now, and one more in each second
    assert rate(list(range(60, 0, -1))) == pytest.approx(30.5)
    assert rate([0] * 55 + [1000] * 5) == pytest.approx(2 * 5000 / 30)
    assert rate([]) == 0
