"""Placing by cached prefixes against round robin, in virtual time: figures are a function of the seed."""

import random
from dataclasses import replace

import pytest

from bench.prefix_placement import COSTS, POLICIES, WORKLOAD
from bench.traffic import Conversation, Sample, hit_ratio, mean_ttft_s
from bench.virtual_cell import VirtualCell
from bench.workloads import Lengths, SharedPrefix, poisson
from core.costs import StepCosts

SHAPES = {
    "two dozen prefixes": (WORKLOAD, 448),
    "short questions": (replace(WORKLOAD, user=Lengths(median=12, sigma=0.6, longest=100)), 448),
    "long questions": (replace(WORKLOAD, user=Lengths(median=300, sigma=0.6, longest=1000)), 600),
    "one turn each": (replace(WORKLOAD, turns=(1, 1)), 448),
    "few and long": (replace(WORKLOAD, num_systems=6, num_shots=1, system_tokens=2048), 512),
}
"""Workloads, and how many blocks a worker has for them."""


def play(name: str, policy: str) -> list[Sample]:
    shape, num_blocks = SHAPES[name]
    settings = (f"router.policy={policy}", f"models.0.kv.num_blocks={num_blocks}")
    return VirtualCell(COSTS, *settings, unified=4, seed=3).play(conversations(shape))


def conversations(shape: SharedPrefix) -> list[Conversation]:
    arrivals = list(poisson(random.Random(3), per_s=3.0 if shape.turns[1] > 1 else 6.0, duration_s=24.0))
    return shape.conversations(arrivals, seed=3)


@pytest.mark.parametrize("name", SHAPES)
def test_what_one_worker_has_read_is_seldom_read_by_another(name: str) -> None:
    """The workers have no room for all prefixes each, but together. Nobody can have what nobody has read: the best that
    is to be had is one worker that takes no time and forgets nothing."""
    plain, aware = (play(name, policy) for policy in POLICIES)
    at_once = StepCosts.linear(fixed_s=1e-6, prompt_token_s=1e-9, decode_row_s=1e-9)
    best = VirtualCell(at_once, "models.0.kv.num_blocks=100000", unified=1).play(conversations(SHAPES[name][0]))
    assert hit_ratio(aware) >= 0.93 * hit_ratio(best), (hit_ratio(aware), hit_ratio(best), hit_ratio(plain))
    assert mean_ttft_s(aware) <= 0.5 * mean_ttft_s(plain), (mean_ttft_s(aware), mean_ttft_s(plain))
