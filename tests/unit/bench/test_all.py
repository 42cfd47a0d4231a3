"""The run of all benches: what each wrote is gathered, and one that misses its bar fails the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.__main__ import Outcome, insert, markdown, run
from bench.bars import Ratio, as_json, show

WRITES = "import sys; open(sys.argv[-1], 'w').write('{\"ratios\": []}'); sys.exit(%d)"


def ratio(best: float, *, is_at_most: bool) -> Ratio:
    return Ratio(name="ours over theirs", best=best, median=best, bar=1.5, is_at_most=is_at_most)


@pytest.mark.parametrize(
    ("best", "is_at_most", "expected"), [(1.5, True, 0), (1.6, True, 1), (1.5, False, 0), (1.4, False, 1)]
)
def test_a_bench_fails_with_any_of_its_bars(
    best: float, is_at_most: bool, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([ratio(best, is_at_most=is_at_most), ratio(1.0, is_at_most=True)]) == expected
    assert ("MISSED" in capsys.readouterr().out) == bool(expected)


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_bench_writes_and_its_status_are_kept(code: int, tmp_path: Path) -> None:
    outcome = run([sys.executable, "-c", WRITES % code], "one", tmp_path)
    assert outcome == Outcome(bench="one", holds=code == 0, figures={"ratios": []})


def test_a_bench_that_breaks_has_no_figures(tmp_path: Path) -> None:
    outcome = run([sys.executable, "-c", "raise SystemExit(2)"], "one", tmp_path)
    assert outcome.lines == ["bench.one: FAILED"]


def test_ratios_are_told_with_their_bars() -> None:
    figures: dict[str, object] = {"ratios": as_json([ratio(2.0, is_at_most=True)])}
    head, line = Outcome(bench="one", holds=False, figures=figures).lines
    assert head == "bench.one: MISSED a bar"
    assert line.split() == ["ours", "over", "theirs", "2.00", "bar", "<=", "1.5", "MISSED"]


def test_what_is_not_installed_is_said_and_no_failure() -> None:
    assert Outcome(bench="one", holds=True, figures={"absent": "a peer", "ratios": []}).lines == [
        "bench.one: nothing beside it, a peer is not installed"
    ]


def test_the_last_run_replaces_the_one_before_and_nothing_else() -> None:
    outcomes = [
        Outcome(bench="one", holds=False, figures={"ratios": as_json([ratio(2.0, is_at_most=True)])}),
        Outcome(bench="two", holds=False, figures=None),
    ]
    section = markdown(outcomes, is_quick=True)
    assert "| `bench.one` | ours over theirs | 2.00 | at most 1.5, **missed** |" in section
    assert "| `bench.two` | FAILED | | |" in section
    once = insert("# Measurements\n\nby hand\n", "old\n")
    twice = insert(once + "\nbehind it\n", section)
    assert twice.startswith("# Measurements\n\nby hand\n") and twice.endswith("\nbehind it\n")
    assert "old" not in twice and section in twice and twice.count("The last run of") == 1
