"""Plays a demand on the simulator (:mod:`bench.virtual_cell`): the scheduler, pools, caches and the router's policy are
the product's, time is virtual, and the same seed is the same run."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.client.conversations import conversations
from bench.client.figures import Objective
from bench.client.prompts import Ids
from bench.client.scripts import Script, salted
from bench.client.shapes import gamma_arrivals
from bench.sizing.model import Split
from bench.sizing.profile import Profile
from bench.traffic import Sample
from bench.virtual_cell import VirtualCell

WARM_SHARE = 0.25
"""Of the requests at the beginning that are not judged: the cell was empty."""
HORIZON_S = 25.0
_MOST = 6000
"""A run that is shorter than answers take, or than a queue takes to grow, says nothing; one that is longer, no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    samples: tuple[Sample, ...]
    """By the time of sending."""

    @property
    def judged(self) -> tuple[Sample, ...]:
        return self.samples[int(WARM_SHARE * len(self.samples)) :]

    def attainment(self, objective: Objective) -> float:
        judged = self.judged
        return sum(is_met(objective, sample) for sample in judged) / len(judged)


def is_met(objective: Objective, sample: Sample) -> bool:
    has_tpot = len(sample.answer) > 1
    return (
        sample.is_ok
        and sample.ttft_s <= objective.ttft_s
        and (not has_tpot or sample.tpot_s <= objective.tpot_s)
        and sample.e2e_s <= objective.e2e_s
        and (math.isinf(objective.itl_s) or max(sample.itl_s, default=0.0) <= objective.itl_s)
    )


def simulate(
    profile: Profile,
    split: Split,
    scripts: Sequence[Script],
    *,
    mode: str = "split",
    seed: int = 0,
    noise: float = 0.02,
) -> Simulated:
    """Each script at its time. ``mode``: of the router; unified workers have none."""
    cell = VirtualCell(
        profile.costs,
        f"models.0.kv.block_size={profile.block_size}",
        f"models.0.kv.num_blocks={max(2, profile.num_kv_tokens // profile.block_size)}",
        *(
            f"models.0.pools.{role}.{name}={getattr(profile, name)}"
            for role, number in (("prefill", split.prefill), ("decode", split.decode), ("unified", split.unified))
            if number
            for name in ("max_sequences", "max_step_tokens", "max_mixed_tokens")
        ),
        f"router.mode={'local' if split.unified else mode}",
        prefill=split.prefill,
        decode=split.decode,
        unified=split.unified,
        noise=noise,
        seed=seed,
        hop_s=profile.first_s / 2,
    )
    return Simulated(samples=tuple(cell.play(conversations(scripts, Ids()))))


def at_rate(scripts: Sequence[Script], rate: float, *, number: int, seed: int = 0) -> list[Script]:
    """``number`` of the scripts, in their order and again from the first when there are too few, as Poisson arrivals.
    Words that come again are others: their prefixes are not cached for that reason."""
    choose = random.Random(seed)
    start = choose.randrange(len(scripts)) if number < len(scripts) else 0
    endless = itertools.chain.from_iterable(salted(scripts, str(turn)) for turn in itertools.count())
    chosen = itertools.islice(endless, start, start + number)
    return [
        replace(script, at_s=at_s) for script, at_s in zip(chosen, gamma_arrivals(rate=rate, seed=seed), strict=False)
    ]


def simulated_knee(
    profile: Profile,
    split: Split,
    scripts: Sequence[Script],
    objective: Objective,
    *,
    share: float,
    guess: float,
    number: int = 400,
    horizon_s: float = HORIZON_S,
    precision: float = 0.03,
    seed: int = 0,
) -> float:
    """The highest rate at which the simulator's attainment is at least ``share``; 0 when there is none near ``guess``
    (within a factor of 64). Each try has ``number`` requests at least, and lasts ``horizon_s`` at least."""

    def holds(rate: float) -> bool:
        enough = min(_MOST, max(number, math.ceil(horizon_s * rate)))
        played = simulate(profile, split, at_rate(scripts, rate, number=enough, seed=seed), seed=seed)
        return played.attainment(objective) >= share

    low, high, rate = 0.0, math.inf, guess or 1.0
    step = 1.15
    for _ in range(24):
        if holds(rate):
            low = rate
        else:
            high = rate
        if high / low <= 1 + precision if low else high < guess / 64:
            break
        rate = math.sqrt(low * high) if low and high < math.inf else low * step if low else high / step
        step = min(2.0, step * 1.3)
    return low
