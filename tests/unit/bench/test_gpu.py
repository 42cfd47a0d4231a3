"""The script for a GPU machine: every step runs in the interpreter, none loses the others, and its bars are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu import Outcome, Step, ratios_of, run_step, wrong_results
from bench.on_gpu import budget
from tests.kernels.gpu import DEVICE

ON = "cuda" if DEVICE.type == "cuda" else "interpreter"
ROOT = Path(__file__).parents[3]


def test_kernels_are_right(tmp_path: Path) -> None:
    figures = run_step("kernels", ON, tmp_path)
    assert figures["wrong"] == {}
    assert len(figures["errors"]) >= 12


@pytest.mark.parametrize("name", ["decode", "prefill", "streams"])
def test_what_is_timed_runs(name: str, tmp_path: Path) -> None:
    figures = run_step(name, ON, tmp_path)
    json.dumps(figures)
    assert ratios_of({name: figures}), "it has what its bars want"


def test_products_are_timed_by_shape(tmp_path: Path) -> None:
    figures = run_step("products", ON, tmp_path)
    assert {row["way"] for row in figures["products"]} == {"cublas", "triton"}
    assert all(row["gbps"] > 0 for row in figures["products"])


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_two_processes_hand_over_and_the_answer_is_that_of_one(tmp_path: Path) -> None:
    figures = run_step("hand_over", ON, tmp_path)
    assert figures["is_equal"]
    assert not wrong_results({"hand_over": figures})
    assert all(each["bytes"] > 0 for each in figures["rounds"])


@pytest.mark.processes
def test_a_step_that_fails_or_hangs_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", (Step(name="no such step", limit_s=60), Step(name="kernels", limit_s=0.1)))
    told: list[Outcome] = []
    outcomes = gpu.run_steps(("no such step", "kernels"), ON, told.append)
    assert [each.figures for each in outcomes] == [None, None]
    assert "invalid choice" in outcomes[0].error
    assert "took longer" in outcomes[1].error
    assert told == outcomes


def test_bars_are_those_of_the_goals() -> None:
    figures = {
        "decode": {"steps": [{"rows": 1, "context": 128, "ratio": 1.19}, {"rows": 64, "context": 2048, "ratio": 1.4}]},
        "prefill": {"prefills": [
            {"tokens": 43, "over_weight_read": 1.1, "share_of_matrix_rate": 0.1},
            {"tokens": 2048, "over_weight_read": 9.0, "share_of_matrix_rate": 0.6},
        ]},
        "streams": {"itl_ratio": 1.1, "streams": [
            {"streams": 1, "wall_over_step": 1.01, "tokens_per_s": 200.0},
            {"streams": 64, "wall_over_step": 1.2, "tokens_per_s": 12000.0},
        ]},
        "hand_over": {"tokens": 3500, "ms": 1.5, "is_equal": True},
        "peer": {"runs": [
            {"streams": 1, "way": "static cache", "tokens_per_s": 50.0},
            {"streams": 64, "way": "static cache", "tokens_per_s": 2000.0},
        ]},
        "peer_batching": {"runs": [
            {"streams": 64, "way": "continuous batching", "tokens_per_s": 4000.0},
            {"streams": 1, "way": "continuous batching", "error": "not in this version"},
        ]},
    }  # fmt: skip
    missed = [ratio.name for ratio in ratios_of(figures) if not ratio.holds]
    assert missed == [
        "step, 64 rows at 2048, over its floor",
        "prompt of 2048, share of the matrix rate",
        "step to step over the device's, 64 streams",
        "tokens/s over transformers, 64 streams",
    ]
    assert len(ratios_of(figures)) == 10
    assert wrong_results({"hand_over": {"is_equal": False}, "kernels": {"wrong": {"attend": 0.5}}}) == [
        "kernel attend: 0.5",
        "the hand-off's tokens are not those of one engine",
    ]


def test_the_budget_of_a_step_is_that_of_the_documentation() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for rows, context in ((1, 128), (64, 2048)):
        assert "\n".join(budget.step_table(budget.Shape(), rows, context)) in text


def test_the_budget_counts_weights_and_keys_once() -> None:
    found = budget.launches(budget.Shape(), 1, 128)
    assert sum(each.times * each.weights for each in found) == 15_136_194_560
    per_layer = [each for each in found if each.times % 36 == 0]
    assert sum(each.times for each in per_layer) // 36 == 8, "and two norms: ten where keys are spread"
    assert torch.finfo(torch.bfloat16).bits // 8 == budget.HALF
