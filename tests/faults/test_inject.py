"""Ten thousand seeded faults through the hand-off in virtual time: 0 undetected, 0 leaks, 0 stuck."""

from __future__ import annotations

import pytest

from tests.faults.inject import run_case, run_cases
from tests.faults.kinds import KINDS

CASES, EFFECTIVE = 1160, 2500
"""Cases of a part, and how many faults take effect in it at least."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(4))
def test_faults_do_no_damage(part: int) -> None:
    """Counts by kind are printed (`pytest -s`)."""
    tally = run_cases(range(part * CASES, (part + 1) * CASES))
    print(f"\n{tally.table()}")
    assert not tally.damage, tally.table()
    assert tally.num_effective >= EFFECTIVE
    assert set(tally.fates) == set(KINDS), "a kind that is never injected"


def test_a_case_is_its_seed() -> None:
    assert run_case(3) == run_case(3)
