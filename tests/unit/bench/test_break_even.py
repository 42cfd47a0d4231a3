"""The learned mode against the two pure ones, in virtual time: figures are a function of the seed."""

import random

import pytest

from bench.break_even import BAR, COSTS, MODES, SETTINGS, WORKLOADS, Workload, compare
from bench.traffic import Sample, mean_ttft_s
from bench.virtual_cell import VirtualCell
from bench.workloads import Lengths, independent, poisson


def draw(workload: Workload, duration_s: float) -> dict[str, list[Sample]]:
    return compare(COSTS, workload.make(random.Random(workload.name), duration_s), seed=7)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_learned_mode_is_within_the_bar_of_the_better_pure_one(workload: Workload) -> None:
    samples = draw(workload, 25.0)
    means = {mode: mean_ttft_s(samples[mode]) for mode in MODES}
    assert means["auto"] <= BAR * min(means["split"], means["local"]), means
    assert {sample.mode for sample in samples["split"]} == {"split"}
    assert {sample.mode for sample in samples["local"]} == {"local"}


def test_a_cell_in_virtual_time_does_the_same_again() -> None:
    first, second = draw(WORKLOADS[0], 5.0), draw(WORKLOADS[0], 5.0)
    for mode in MODES:
        assert [(s.ttft_s, s.mode) for s in first[mode]] == [(s.ttft_s, s.mode) for s in second[mode]]


def test_prompts_leave_a_prefill_worker_that_becomes_four_times_as_slow_and_come_back() -> None:
    """By themselves, within 200 requests. One pair, so that nothing else could do it."""
    cell = VirtualCell(COSTS, *SETTINGS, prefill=1, decode=1, seed=3)
    arrivals = list(poisson(random.Random(1), per_s=1.0, duration_s=360.0))
    lengths = Lengths(median=500, sigma=0.3)
    prefill = cell.workers["prefill-0"]
    cell.at(120.0, lambda: setattr(prefill, "costs", COSTS.scaled(prompt=4)))
    cell.at(240.0, lambda: setattr(prefill, "costs", COSTS))
    samples = cell.play(independent(arrivals, prompt=lengths, answer=Lengths(median=12)))

    def share_split(from_s: float) -> float:
        """Of the second half of a stretch of two minutes."""
        modes = [s.mode for s in samples if from_s + 60 <= s.sent_s < from_s + 120]
        return modes.count("split") / len(modes)

    before, slow, after = share_split(0.0), share_split(120.0), share_split(240.0)
    assert slow < 0.5 * before and after > 0.7 * before, (before, slow, after)
