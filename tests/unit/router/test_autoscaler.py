"""Sizes over virtual time: what each trace of demand makes of both pools, and what no trace may make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import AutoscaleConfig
from core.types import Role
from router.autoscaler import Action, Decision, Observation, PoolFacts, Rates, decide

P, D = Role.PREFILL, Role.DECODE
RATES = Rates(prefill_tokens_per_s=1000.0, batch=10.0, num_blocks=100)
SETTINGS = AutoscaleConfig(mode="act")
STEP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    prompt_tokens_per_s: float = 0.0
    answers: int = 0
    """At once, in all decode workers."""
    used_blocks: int = 0
    held_share: float = 0.0


@dataclass(kw_only=True)
class Fleet:
    """A cluster that does what is decided: workers start after a while, demand is given."""

    settings: AutoscaleConfig = SETTINGS
    start_s: float = 10.0
    rates: Rates | None = RATES
    now: float = 0.0
    desired: dict[Role, int] = field(default_factory=lambda: {P: 1, D: 1})
    ready: dict[Role, int] = field(default_factory=lambda: {P: 1, D: 1})
    coming: list[tuple[float, Role]] = field(default_factory=list)
    unready: int = 0
    problem: str = ""
    history: list[Decision] = field(default_factory=list)

    def observe(self, demand: Demand) -> Observation:
        def facts(role: Role, **more: object) -> PoolFacts:
            return PoolFacts(
                desired=self.desired[role],
                ready=self.ready[role],
                num_unready=self.unready,
                problem=self.problem if self.ready[role] < self.desired[role] else "",
                **more,  # type: ignore[arg-type]
            )

        return Observation(
            at=self.now,
            prompt_tokens_per_s=demand.prompt_tokens_per_s,
            rates=self.rates,
            pools=(
                (P, facts(P, held_share=demand.held_share)),
                (D, facts(D, num_requests=demand.answers, used_blocks=demand.used_blocks)),
            ),
        )

    def tick(self, demand: Demand) -> Decision:
        self.now += STEP_S
        for at, role in list(self.coming):
            if at <= self.now and not self.problem:
                self.coming.remove((at, role))
                self.ready[role] += 1
        decision = decide(self.observe(demand), self.settings, self.history)
        self.history.append(decision)
        for role, step in decision.steps:
            self.desired[role] += step
            self.ready[role] = min(self.ready[role], self.desired[role])
            missing = self.desired[role] - self.ready[role]
            due = [one for one in self.coming if one[1] is role]
            for extra in due[missing:]:
                self.coming.remove(extra)
            self.coming += [(self.now + self.start_s, role)] * (missing - len(due))
        return decision

    def run(self, seconds: float, demand: Demand | Callable[[float], Demand]) -> list[Decision]:
        since, decisions = self.now, []
        while self.now < since + seconds:
            decisions.append(self.tick(demand(self.now - since) if callable(demand) else demand))
        return decisions

    @property
    def sizes(self) -> tuple[int, int]:
        return self.desired[P], self.desired[D]


def changes(decisions: list[Decision]) -> list[tuple[tuple[Role, int], ...]]:
    return [one.steps for one in decisions if one.steps]


def test_a_ramp_is_followed_step_by_step_and_by_both_pools_for_what_each_needs() -> None:
    fleet = Fleet()
    decisions = fleet.run(600, lambda at: Demand(prompt_tokens_per_s=4 * at, answers=int(at / 25)))
    assert fleet.sizes == (3, 3)  # 2400 of 3 x 1000 x 0.8, 24 of 3 x 10 x 0.8
    assert all(step == 1 for steps in changes(decisions) for _, step in steps)


def test_a_burst_is_met_at_once_within_the_step_limit_and_a_short_one_not_at_all() -> None:
    fleet = Fleet()
    fleet.run(60, Demand())
    assert changes(fleet.run(5, Demand(prompt_tokens_per_s=9000))) == []
    fleet.run(60, Demand())
    (first, *_) = changes(fleet.run(30, Demand(prompt_tokens_per_s=9000)))
    assert first == ((P, SETTINGS.max_step_up),)
    fleet.run(600, Demand(prompt_tokens_per_s=9000))
    assert fleet.sizes == (8, 1), "never above the maximum"
    assert "prefill:at_max" in fleet.tick(Demand(prompt_tokens_per_s=9000)).reason


def test_after_a_drop_one_worker_goes_at_a_time_and_only_after_long_agreement() -> None:
    fleet = Fleet(desired={P: 4, D: 4}, ready={P: 4, D: 4})
    fleet.run(400, Demand(prompt_tokens_per_s=3000, answers=30))
    assert fleet.sizes == (4, 4)
    assert changes(fleet.run(SETTINGS.down_stable_s - STEP_S, Demand())) == []
    decisions = fleet.run(1500, Demand())
    assert fleet.sizes == (1, 1)
    assert all(len(steps) == 1 and steps[0][1] == -1 for steps in changes(decisions))
    times = [one.at for one in decisions if one.steps]
    assert min(later - earlier for earlier, later in pairwise(times)) >= SETTINGS.down_cooldown_s


def test_what_shifts_from_answers_to_prompts_flips_a_worker_and_starts_none() -> None:
    fleet = Fleet(desired={P: 1, D: 3}, ready={P: 1, D: 3})
    fleet.run(400, Demand(prompt_tokens_per_s=500, answers=20))
    decisions = fleet.run(600, Demand(prompt_tokens_per_s=1400, answers=5))
    assert fleet.sizes[0] == 2
    flips = [one for one in decisions if one.action is Action.FLIP]
    assert len(flips) <= 1 and all(one.flip_from is D for one in flips)


def test_a_flip_is_chosen_when_one_pool_has_been_too_large_for_long_and_the_other_is_too_small() -> None:
    fleet = Fleet(desired={P: 1, D: 3}, ready={P: 1, D: 3})
    fleet.run(SETTINGS.down_stable_s - SETTINGS.up_stable_s, Demand(prompt_tokens_per_s=500, answers=5))
    decisions = fleet.run(60, Demand(prompt_tokens_per_s=1400, answers=5))
    (flip,) = [one for one in decisions if one.steps]
    assert (flip.action, flip.flip_from, dict(flip.steps)) == (Action.FLIP, D, {D: -1, P: 1})
    assert fleet.sizes == (2, 2)


def test_flapping_demand_moves_nothing() -> None:
    fleet = Fleet(desired={P: 2, D: 2}, ready={P: 2, D: 2})
    low, high = Demand(prompt_tokens_per_s=200, answers=2), Demand(prompt_tokens_per_s=1900, answers=19)
    assert changes(fleet.run(1200, lambda at: high if int(at / STEP_S) % 2 else low)) == []


def test_demand_around_a_bound_does_not_move_a_pool_to_and_fro() -> None:
    fleet = Fleet()
    decisions = fleet.run(3000, lambda at: Demand(prompt_tokens_per_s=790 + 20 * (int(at / 100) % 2)))
    assert len(changes(decisions)) == 1, "up once; 0.79 of one worker left would be above down_use"


def test_without_a_measured_rate_nothing_is_decided_and_it_is_said() -> None:
    fleet = Fleet(rates=None, desired={P: 3, D: 3}, ready={P: 3, D: 3})
    decisions = fleet.run(1000, Demand(prompt_tokens_per_s=9000))
    assert {one.reason for one in decisions} == {"missing"} and changes(decisions) == []
    fleet.rates = RATES  # what was missing before is no agreement
    assert changes(fleet.run(SETTINGS.down_stable_s - STEP_S, Demand())) == []


def test_nobody_goes_while_somebody_is_not_ready_or_suspect() -> None:
    fleet = Fleet(desired={P: 2, D: 2}, ready={P: 2, D: 2}, unready=1)
    assert changes(fleet.run(1000, Demand())) == []
    assert "down_unready" in fleet.history[-1].reason
    fleet.unready = 0
    assert changes(fleet.run(10, Demand())) != []


def test_pending_workers_count_and_those_that_cannot_be_started_are_cancelled() -> None:
    fleet = Fleet(start_s=1e9)
    assert changes(fleet.run(300, Demand(prompt_tokens_per_s=4000))) == [((P, 2),)]
    assert "prefill:pending" in fleet.history[-1].reason
    fleet.problem = "no CPU is free"
    assert changes(fleet.run(60, Demand(prompt_tokens_per_s=100))) == [((P, -2),)]
    assert fleet.sizes == (1, 1)


def test_what_was_never_started_is_no_worker_to_flip() -> None:
    fleet = Fleet(desired={P: 1, D: 3}, ready={P: 1, D: 1}, problem="no CPU is free")
    (change,) = [one for one in fleet.run(30, Demand(prompt_tokens_per_s=1400, answers=5)) if D in dict(one.steps)]
    assert (change.action, change.flip_from, dict(change.steps)[D]) == (Action.SCALE, None, -2)


def test_prefill_that_waits_for_decode_is_not_made_larger() -> None:
    fleet = Fleet()
    decisions = fleet.run(60, Demand(prompt_tokens_per_s=5000, answers=5, held_share=0.9))
    assert fleet.sizes[0] == 1 and fleet.sizes[1] > 1
    assert "prefill:kv_hold" in decisions[-1].reason


def test_a_pool_keeps_what_its_running_answers_fill() -> None:
    fleet = Fleet(desired={P: 1, D: 2}, ready={P: 1, D: 2}, settings=SETTINGS.model_copy(update={"down_use": 0.8}))
    fleet.rates = replace(RATES, num_blocks=100)
    assert changes(fleet.run(900, Demand(answers=1, used_blocks=75))) != []
    full = Fleet(desired={P: 1, D: 2}, ready={P: 1, D: 2})
    assert changes(full.run(900, Demand(answers=1, used_blocks=95))) == []


def test_off_decides_nothing_and_a_unified_pool_is_sized_for_both() -> None:
    off = Fleet(settings=AutoscaleConfig(mode="off"))
    assert {one.reason for one in off.run(100, Demand(prompt_tokens_per_s=9000))} == {"off"}
    facts = PoolFacts(desired=1, ready=1, num_requests=12, queued_tokens=0)
    seen = Observation(at=0.0, prompt_tokens_per_s=1000.0, pools=((Role.UNIFIED, facts),), rates=RATES)
    decision = decide(seen, SETTINGS.model_copy(update={"up_stable_s": 0.0}), ())
    assert dict(decision.needs) == {Role.UNIFIED: 2.2} and dict(decision.targets) == {Role.UNIFIED: 3}
    assert dict(decision.steps) == {Role.UNIFIED: 2}


@given(
    st.lists(st.tuples(st.floats(0, 2e4), st.integers(0, 200), st.floats(0, 1), st.integers(0, 2)), max_size=120),
    st.integers(1, 4),
    st.integers(1, 4),
)
@settings(max_examples=60)
def test_no_demand_leads_out_of_the_bounds_or_past_a_guard(
    trace: list[tuple[float, int, float, int]], prefill: int, decode: int
) -> None:
    limits = {"prefill": {"min": 1, "max": 5}, "decode": {"min": 1, "max": 5}}
    fleet = Fleet(desired={P: prefill, D: decode}, ready={P: prefill, D: decode})
    fleet.settings = AutoscaleConfig.model_validate(
        {"mode": "act", "down_stable_s": 20, "down_cooldown_s": 10, **limits}
    )
    for tokens, answers, held, unready in trace:
        fleet.unready = unready
        demand = Demand(prompt_tokens_per_s=tokens, answers=answers, held_share=held)
        decision = fleet.tick(demand)
        assert all(1 <= size <= 5 for size in fleet.sizes)
        downs = [role for role, step in decision.steps if step < 0]
        assert len(downs) <= 1 and all(step <= fleet.settings.max_step_up for _, step in decision.steps)
        assert not (downs and unready)
