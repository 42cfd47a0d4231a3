"""Workloads: functions of a seed, with the lengths and rates that they are meant to have."""

from __future__ import annotations

import random
import statistics

from bench.traffic import Conversation
from bench.workloads import Lengths, SharedPrefix, bursts, independent, poisson, ramp


def shared(seed: int) -> list[Conversation]:
    return SharedPrefix().conversations(list(poisson(random.Random(seed), per_s=20, duration_s=10)), seed=seed)


def test_equal_seeds_give_equal_workloads_and_others_do_not() -> None:
    assert shared(1) == shared(1) != shared(2)


def test_arrivals_ascend_and_come_as_often_as_asked() -> None:
    for arrivals in (
        list(poisson(random.Random(0), per_s=50, duration_s=100)),
        list(bursts(random.Random(0), per_s=50, duration_s=100)),
    ):
        assert arrivals == sorted(arrivals) and arrivals[-1] < 100
        assert 4700 < len(arrivals) < 5300


def test_bursts_leave_most_of_each_period_empty() -> None:
    assert max(at % 10 for at in bursts(random.Random(0), per_s=50, duration_s=100, on_share=0.2)) < 2


def test_a_ramp_goes_from_rate_to_rate() -> None:
    arrivals = list(ramp(random.Random(0), [(10, 50), (100, 50), (10, 50)]))
    counts = [sum(low <= at < low + 50 for at in arrivals) for low in (0, 50, 100)]
    assert arrivals == sorted(arrivals) and counts[1] > 5 * max(counts[0], counts[2])


def test_lengths_have_their_median_and_stay_within_their_ends() -> None:
    choose = random.Random(0)
    drawn = [Lengths(median=100, sigma=1.0, shortest=10, longest=500).draw(choose) for _ in range(4000)]
    assert 95 < statistics.median(drawn) < 105 and min(drawn) == 10 and max(drawn) == 500
    assert {Lengths(median=7).draw(choose) for _ in range(9)} == {7}


def test_independent_prompts_share_no_block() -> None:
    made = independent(list(range(200)), prompt=Lengths(median=64), answer=Lengths(median=8), label="a")
    assert len({each.turns[0].tokens[:16] for each in made}) == 200
    assert [each.at_s for each in made] == list(range(200)) and {each.label for each in made} == {"a"}


def test_conversations_of_one_application_begin_alike() -> None:
    workload = SharedPrefix(num_systems=3, num_shots=2, system_tokens=50, shot_tokens=20, skew=1.0)
    made = workload.conversations([0.0] * 600)
    systems = [each.prefix[:50] for each in made]
    popularity = sorted((systems.count(one) for one in set(systems)), reverse=True)
    assert len(popularity) == 3 and popularity[0] > 1.5 * popularity[1] > 1.5 * popularity[2]
    assert len({each.prefix for each in made}) == 6
    assert {len(each.turns) for each in made} == {1, 2, 3, 4}
