"""Thousands of seeded faults through the hand-off in virtual time: 0 undetected, 0 leaks, 0 stuck."""

from __future__ import annotations

import pytest

from tests.faults.inject import run_cases
from tests.faults.kinds import KINDS

CASES_IN_CI, ALL_CASES = 600, 6000


def _check(first: int, num_cases: int, min_effective: int) -> None:
    tally = run_cases(range(first, first + num_cases))
    print(f"\n{tally.table()}")
    assert not tally.damage, tally.table()
    assert tally.num_effective >= min_effective
    assert all(tally.fates[kind].total() for kind in KINDS), "a kind that is never injected"


def test_a_sample_of_faults_does_no_damage() -> None:
    _check(0, CASES_IN_CI, 1000)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_thousand_faults_do_no_damage() -> None:
    _check(0, ALL_CASES, 10_000)
