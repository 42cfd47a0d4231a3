"""Benches that compare: what wins and loses is told as it is, and apart is apart whichever side is larger."""

from __future__ import annotations

import pytest

from bench.aiperf import Seen as ClientSeen
from bench.aiperf import compare
from bench.plan_accuracy import CASES, CODE, Outcome, ratios
from bench.plan_accuracy import PROFILE as H200
from bench.simulator_accuracy import MOCK_COSTS, Pair, workloads
from bench.sizing.model import Split
from bench.sizing.plan import make_plan
from bench.sizing.profile import Profile
from bench.split_or_not import WORKLOADS, Seen, markdown, simulated
from bench.split_or_not import ratios as split_ratios

PROFILE = Profile(costs=MOCK_COSTS)


def seen(ttft: float, itl: float, attainment: float) -> Seen:
    return Seen(ttft_p50=ttft, ttft_p99=ttft, tpot_p50=0.02, itl_p99=itl, attainment=attainment)


def test_losses_are_told_with_what_was_lost() -> None:
    first, third = WORKLOADS[0], WORKLOADS[2]
    table = {
        first.name: {"split": seen(1.0, 0.03, 1.0), "auto": seen(1.0, 0.05, 1.0), "unsplit": seen(1.0, 0.06, 0.9)},
        third.name: {"split": seen(2.0, 0.03, 0.4), "auto": seen(1.0, 0.05, 0.6), "unsplit": seen(1.0, 0.06, 0.9)},
    }
    told = markdown(table, [first, third])
    assert "splitting wins" in told and "**splitting loses**: TTFT, attainment (one worker reads" in told
    itl, good, bad = split_ratios(table)
    assert itl.holds and good.holds and not bad.holds
    assert [each.best for each in (itl, good, bad)] == pytest.approx([0.5, 1.0, 2 / 3])


def test_simulated_answers_are_smoother_where_prompts_are_read_elsewhere() -> None:
    row = simulated(WORKLOADS[:1], 40, PROFILE)[WORKLOADS[0].name]
    assert row["split"].itl_p99 < row["unsplit"].itl_p99


def test_apart_is_apart_on_either_side() -> None:
    for real, other in ((1.0, 1.3), (1.3, 1.0)):
        found = Pair(name="x", real=real, simulated=other, bar=1.25).ratio
        assert found.best == pytest.approx(1.3) and not found.holds
    assert not Pair(name="x", real=0.0, simulated=1.0, bar=1.1).ratio.holds, "a knee that was not found is no match"
    runs = [ClientSeen(client=name, ttft_s=t, tpot_s=0.02, tokens_per_s=9.0) for name, t in
            (("baton bench", 0.1), ("aiperf", 0.104), ("aiperf", 0.102), ("baton bench", 0.1))]  # fmt: skip
    assert all(each.holds for each in compare(runs))


def test_what_a_simulator_is_judged_by_fits_its_target() -> None:
    for scripts in workloads(400).values():
        assert len(scripts) == 400 and max(s.lines[0].num_tokens + s.lines[0].max_tokens for s in scripts) <= 200 + 120


def test_a_plan_is_judged_by_what_its_choice_serves() -> None:
    case = CASES[-1]
    plan = make_plan(H200, case.scripts()[:200], case.objective, num_workers=3, share=0.5)
    others = {row.split: 1.0 for row in plan.rows}
    good = Outcome(case=CODE, plan=plan, simulated=others | {plan.best.split: 2.0})
    bad = Outcome(case=CODE, plan=plan, simulated=others | {Split(unified=9): 2.0})
    assert ratios([good])[0].holds and not ratios([bad])[0].holds
