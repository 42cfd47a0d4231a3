"""Compares all splits of some hardware with each other and with the same hardware unsplit, and says which to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.client.figures import Objective
from bench.client.scripts import Script
from bench.sizing.demand import Demand
from bench.sizing.model import Model, Split, Stage
from bench.sizing.profile import Profile
from bench.sizing.simulate import HORIZON_S, simulated_knee
from core.errors import ConfigError

MOST_WORKERS = 1024
_SAMPLE = 2000
"""Requests that the formulas look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one split can serve."""

    split: Split
    rate: float
    """Requests a second that meet the objectives, as far as the formulas know."""
    limit: Stage
    prefill_load: float
    decode_load: float
    """At that rate; what is far below 1 has something to spare."""
    simulated: float | None = None
    """The same by the simulator, where it was asked."""

    @property
    def known_rate(self) -> float:
        return self.rate if self.simulated is None else self.simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What is best when lengths are others than thought."""

    what: str
    best: Split
    rate: float
    kept: float
    """Rate of the split that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rows: tuple[Row, ...]
    """Splits, by the number of prefill workers."""
    unified: Row
    naive: Row
    share: float
    objective: Objective
    num_workers: int
    sensitivity: tuple[Sensitivity, ...] = ()

    @property
    def best_split(self) -> Row:
        """Formulas are not compared with simulations: where there are any, those are the candidates."""
        return max(self.rows, key=lambda row: (row.simulated is not None, row.known_rate))

    @property
    def is_split(self) -> bool:
        """False: the same hardware serves at least as much unsplit."""
        return self.best_split.known_rate > self.unified.known_rate

    @property
    def best(self) -> Row:
        return self.best_split if self.is_split else self.unified


def make_plan(
    profile: Profile,
    scripts: Sequence[Script],
    objective: Objective,
    *,
    num_workers: int | None = None,
    rate: float | None = None,
    share: float = 0.95,
    counts_cache: bool = True,
) -> Plan:
    """For so many workers, or for the fewest that serve ``rate``. Raises ConfigError where nothing can work."""
    if num_workers is not None and num_workers < 2:
        raise ConfigError("splitting needs two workers at least: one reads prompts, one writes answers")
    demand = Demand.of(scripts, block_size=profile.block_size).thinned(_SAMPLE)
    if not counts_cache:
        demand = Demand(prompts=demand.prompts, cached=demand.cached * 0, answers=demand.answers)
    _check_room(profile, demand)
    model = Model(profile, demand, objective)
    if num_workers is None:
        assert rate is not None, "either is given"
        num_workers = _fewest(model, rate, share)
    splits = [Split(prefill=number, decode=num_workers - number) for number in range(1, num_workers)]
    rows = tuple(_row(model, split, share) for split in splits)
    unified = _row(model, Split(unified=num_workers), share)
    if not any(row.rate for row in (*rows, unified)):
        alone = model.judge(Split(prefill=MOST_WORKERS, decode=MOST_WORKERS), 1e-3)
        raise ConfigError(
            f"no split meets {objective} for {share:.0%} of these requests, even without load "
            f"({alone.attainment:.0%} are met then, limited by {alone.stage}): loosen them, or take faster workers"
        )
    plan = Plan(
        rows=rows,
        unified=unified,
        naive=_row(model, model.naive_split(num_workers), share),
        share=share,
        objective=objective,
        num_workers=num_workers,
    )
    return _with_sensitivity(plan, model)


def verify(
    plan: Plan,
    profile: Profile,
    scripts: Sequence[Script],
    *,
    number: int = 400,
    horizon_s: float = HORIZON_S,
    everything: bool = False,
) -> Plan:
    """The rates of the best split, its neighbours, the naive one and the unsplit baseline by simulation (of all with
    ``everything``); what is best is judged by those."""
    best = plan.best_split.split.prefill
    chosen = {best - 1, best, best + 1, plan.naive.split.prefill}

    def simulated(row: Row) -> Row:
        guess = row.rate or plan.best.rate / 4
        found = simulated_knee(
            profile,
            row.split,
            scripts,
            plan.objective,
            share=plan.share,
            guess=guess,
            number=number,
            horizon_s=horizon_s,
        )
        return replace(row, simulated=found)

    rows = tuple(simulated(row) if everything or row.split.prefill in chosen else row for row in plan.rows)
    naive = next(row for row in rows if row.split == plan.naive.split)
    return replace(plan, rows=rows, unified=simulated(plan.unified), naive=naive)


def _row(model: Model, split: Split, share: float) -> Row:
    rate, stage = model.best_rate(split, share)
    verdict = model.judge(split, rate)
    return Row(split=split, rate=rate, limit=stage, prefill_load=verdict.prefill_load, decode_load=verdict.decode_load)


def _fewest(model: Model, rate: float, share: float) -> int:
    """Workers that serve ``rate``, split in the best way or not at all."""

    def serves(number: int) -> bool:
        if model.best_rate(Split(unified=number), share)[0] >= rate:
            return True
        return max(model.best_rate(split, share)[0] for split in _around_best(model, number, share)) >= rate

    most = 2
    while not serves(most):
        most *= 2
        if most > MOST_WORKERS:
            raise ConfigError(
                f"no {MOST_WORKERS} workers serve {rate:g} requests/s within these objectives: loosen them"
            )
    least = most // 2 + 1
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if serves(middle) else (middle + 1, most)
    return max(2, least)


def _around_best(model: Model, number: int, share: float) -> list[Split]:
    """The best split of so many workers is where both sides serve the same: rates of one side grow with its workers."""
    low, high = 1, number - 1
    while high - low > 2:
        middle = (low + high) // 2
        _, stage = model.best_rate(Split(prefill=middle, decode=number - middle), share)
        low, high = (middle, high) if stage is Stage.PREFILL else (low, middle)
    return [Split(prefill=each, decode=number - each) for each in range(low, high + 1)]


def _with_sensitivity(plan: Plan, model: Model) -> Plan:
    found = []
    changes = [
        (name, key, factor) for name, key in (("prompts", "prompt"), ("answers", "answer")) for factor in (0.75, 1.25)
    ]
    for name, key, factor in changes:
        other = Model(model.profile, model.demand.scaled(**{key: factor}), model.objective)
        splits = [row.split for row in plan.rows] + [plan.unified.split]
        rates = {split: other.best_rate(split, plan.share)[0] for split in splits}
        best = max(splits, key=lambda split: rates[split])
        what = f"{name} {100 * (factor - 1):+.0f} %"
        found.append(Sensitivity(what=what, best=best, rate=rates[best], kept=rates[plan.best.split]))
    return replace(plan, sensitivity=tuple(found))


def _check_room(profile: Profile, demand: Demand) -> None:
    longest = int((demand.prompts + demand.answers).max())
    if longest > profile.num_kv_tokens:
        raise ConfigError(
            f"a request of {longest} tokens does not fit into a worker, which holds {profile.num_kv_tokens}: "
            "cut the trace (--longest), or name the right number (--kv-tokens)"
        )
