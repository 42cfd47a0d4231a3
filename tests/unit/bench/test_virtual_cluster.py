"""The mock cluster in virtual time is a cluster: its answers are those of one worker alone, nothing is left behind, and
time is what the cost table says."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.client.conversations import conversations
from bench.client.prompts import Ids
from bench.client.scripts import Line, Part, Script
from bench.traffic import Conversation, Sample
from bench.virtual.cluster import MockCluster
from bench.virtual.loop import VirtualLoop
from bench.virtual_cluster import PROFILE, TRACE, Outcome, growth_plot, ratios, run_one
from bench.workloads import Lengths, SharedPrefix
from core.costs import HandoffCosts, StepCosts
from tests.support.tiny_model import CONFIG, write_folder

T = TypeVar("T")
COSTS = StepCosts.linear(
    fixed_s=0.01, prompt_token_s=1e-4, decode_row_s=1e-4, handoff=HandoffCosts(fixed_s=0.005, token_s=1e-5)
)
SETTINGS = ("models.0.kv.num_blocks=200", "models.0.kv.block_size=4", "router.mode=split")
WORKLOAD = SharedPrefix(
    num_systems=2,
    system_tokens=40,
    num_shots=2,
    shot_tokens=20,
    turns=(1, 3),
    user=Lengths(median=12, sigma=0.5, longest=24),
    answer=Lengths(median=8, sigma=0.5, longest=16),
    think_s=0.5,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_folder(folder, config={**CONFIG, "max_position_embeddings": 512, "vocab_size": 2000}))


def run(story: Coroutine[Any, Any, T], *, is_metered: bool = False) -> T:
    loop = VirtualLoop(is_metered=is_metered)
    result = loop.run(story)
    assert not loop.errors, loop.errors[0]
    return result


async def play(model: str, workload: list[Conversation], *overrides: str, **sizes: int) -> list[Sample]:
    cluster = MockCluster(COSTS, *SETTINGS, *overrides, model=model, **sizes)
    await cluster.ready()
    samples = await cluster.play(workload)
    await cluster.idle()
    await cluster.close()
    assert {sample.outcome for sample in samples} == {"ok"}
    return samples


def test_split_answers_are_those_of_one_worker_alone(tiny: str) -> None:
    workload = WORKLOAD.conversations([0.05 * number for number in range(24)])
    alone = run(play(tiny, workload, unified=1))
    split = run(play(tiny, workload, prefill=2, decode=2))
    assert sorted(sample.answer for sample in split) == sorted(sample.answer for sample in alone)
    assert {sample.mode for sample in split} == {"split"} and {sample.mode for sample in alone} == {"local"}
    assert any(sample.num_cached_tokens for sample in split), "prefixes are shared"
    assert len({sample.decode_worker for sample in split}) == 2


def test_time_is_what_the_cost_table_says(tiny: str) -> None:
    script = Script(lines=(Line(parts=(Part(key="a", num_tokens=100),), max_tokens=11),))
    (sample,) = run(play(tiny, list(conversations([script], Ids())), prefill=1, decode=1))
    assert sample.ttft_s == pytest.approx(0.01 + 100e-4, abs=0.006), "one step that reads the prompt, and a few hops"
    assert sum(sample.itl_s[1:]) == pytest.approx(9 * 0.0101, rel=0.02), "steps of one row follow each other"
    assert 0.0101 + 0.005 <= sample.itl_s[0] <= 0.0101 + 0.005 + 0.001 + 0.01, "the hand-off comes before the second"


def test_cpu_time_is_metered_by_process(tiny: str) -> None:
    async def story() -> tuple[float, float, float]:
        cluster = MockCluster(COSTS, *SETTINGS, model=tiny, prefill=1, decode=1)
        await cluster.ready()
        await cluster.play(WORKLOAD.conversations([0.0, 0.1]))
        await cluster.close()
        return cluster.gateway.cpu_s, cluster.router.cpu_s, cluster.workers["decode-0"].process.cpu_s

    assert all(seconds > 0 for seconds in run(story(), is_metered=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_64_workers_lose_no_request_of_two_minutes_of_conversations() -> None:
    """And leave nothing behind: the replay looks at every worker before it ends."""
    options = argparse.Namespace(trace=TRACE, duration=float("inf"), profile=PROFILE)
    outcome = run_one(options, 64)
    assert outcome.outcomes == {"ok": 339} and outcome.hit_ratio > 0.05


def test_what_is_lost_and_what_grows_is_judged() -> None:
    def outcome(num_workers: int, router_us: float, **outcomes: int) -> Outcome:
        zeros = dict.fromkeys(("gateway_us", "router_idle_us", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s"), 0.0)
        rest = {"hit_ratio": 0.0, "virtual_s": 1.0, "cpu_s": 1.0}
        return Outcome(num_workers=num_workers, num_requests=9, outcomes=outcomes, router_us=router_us, **zeros, **rest)

    good = [outcome(8, 100.0, ok=9), outcome(64, 300.0, ok=9)]
    assert all(ratio.holds for ratio in ratios(good)) and "router" in growth_plot(good)
    assert not ratios([outcome(8, 100.0, ok=8, hung=1), outcome(64, 300.0, ok=9)])[0].holds
    assert not ratios([outcome(8, 100.0, ok=9), outcome(64, 500.0, ok=9)])[1].holds
