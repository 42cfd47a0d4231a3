"""Split, local, or what the router thinks is cheaper: mean time to the first token over five workloads.

Three cells serve the same conversations, with the same arrival times: one always splits, one never does, one learns
(``router.mode``). The learning cell knows nothing when a workload begins, and no request is left out.

The cells are in virtual time (bench/virtual_cell.py: the router's books and policy, the engine's scheduler, block pool
and prefix cache, steps that take what a cost table says), so the figures are the same on any machine. ``--real`` has
whole mock workers instead (bench/cell.py), the three cells beside each other, so that a machine that is busy with other
things disturbs all alike.

    python -m bench.break_even [--quick] [--only NAME ...] [--costs FILE] [--real] [--json FILE]

The bar: the learning cell's mean TTFT is at most 1.1 times that of the better of the two others.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from bench.cell import MockCell
from bench.load import quantile
from bench.traffic import Conversation, Sample, mean_ttft_s, play
from bench.virtual_cell import VirtualCell
from bench.workloads import Lengths, SharedPrefix, bursts, independent, poisson
from core.config import set_worker_environment
from core.costs import HandoffCosts, StepCosts, read_costs

BAR = 1.1
MODES = ("split", "local", "auto")
COSTS = StepCosts.linear(
    fixed_s=0.04,
    prompt_token_s=2.5e-4,
    prompt_pair_s=8e-9,
    decode_row_s=3e-4,
    decode_position_s=3e-7,
    handoff=HandoffCosts(fixed_s=0.03, token_s=3e-5),
)
"""An 8B model on a large GPU (notes of its step times and of a 400 Gb/s link), ten times as slow: what the cells' own
Python takes then counts for little."""
SETTINGS = ("models.0.pools.prefill.max_step_tokens=1024", "models.0.pools.decode.max_mixed_tokens=256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``make`` draws the conversations of so many seconds."""

    name: str
    make: Callable[[random.Random, float], list[Conversation]]


def _short_chat(choose: random.Random, duration_s: float) -> list[Conversation]:
    arrivals = list(poisson(choose, per_s=3.0, duration_s=duration_s))
    return independent(
        arrivals, prompt=Lengths(median=60, sigma=0.5, longest=300), answer=Lengths(median=20, sigma=0.5)
    )


def _long_prompts(choose: random.Random, duration_s: float) -> list[Conversation]:
    arrivals = list(poisson(choose, per_s=1.6, duration_s=duration_s))
    return independent(
        arrivals, prompt=Lengths(median=1800, sigma=0.4, longest=4000), answer=Lengths(median=6, sigma=0.3)
    )


def _shared_prefixes(choose: random.Random, duration_s: float) -> list[Conversation]:
    arrivals = list(poisson(choose, per_s=1.2, duration_s=duration_s))
    shape = SharedPrefix(num_systems=4, num_shots=2, turns=(1, 3), answer=Lengths(median=12, sigma=0.5, longest=60))
    return shape.conversations(arrivals)


def _mixed_bursts(choose: random.Random, duration_s: float) -> list[Conversation]:
    chat = list(bursts(choose, per_s=1.5, duration_s=duration_s, period_s=5, on_share=0.3))
    long = list(bursts(choose, per_s=0.7, duration_s=duration_s, period_s=5, on_share=0.3))
    return independent(
        chat, prompt=Lengths(median=80, sigma=0.6, longest=400), answer=Lengths(median=20, sigma=0.5), label="chat"
    ) + independent(
        long, prompt=Lengths(median=1200, sigma=0.5, longest=4000), answer=Lengths(median=10, sigma=0.3), label="long"
    )


def _long_answers(choose: random.Random, duration_s: float) -> list[Conversation]:
    arrivals = list(poisson(choose, per_s=1.5, duration_s=duration_s))
    return independent(
        arrivals,
        prompt=Lengths(median=400, sigma=0.5, longest=1500),
        answer=Lengths(median=120, sigma=0.4, longest=300),
    )


WORKLOADS = (
    Workload(name="short chat", make=_short_chat),
    Workload(name="long prompts", make=_long_prompts),
    Workload(name="shared prefixes", make=_shared_prefixes),
    Workload(name="mixed bursts", make=_mixed_bursts),
    Workload(name="long answers", make=_long_answers),
)


def compare(costs: StepCosts, conversations: list[Conversation], *, seed: int) -> dict[str, list[Sample]]:
    """The samples of each mode, in virtual time."""
    settings = [(mode, (f"router.mode={mode}", *SETTINGS)) for mode in MODES]
    cells = {mode: VirtualCell(costs, *each, prefill=2, decode=2, seed=seed) for mode, each in settings}
    return {mode: cell.play(conversations) for mode, cell in cells.items()}


async def compare_real(costs: StepCosts, conversations: list[Conversation]) -> dict[str, list[Sample]]:
    """The same with mock workers, beside each other."""
    cells = [MockCell(costs, f"router.mode={mode}", *SETTINGS, prefill=2, decode=2) for mode in MODES]
    async with cells[0], cells[1], cells[2]:
        played = await asyncio.gather(*[play(cell.ask, conversations) for cell in cells])
    return dict(zip(MODES, played, strict=True))


def _ratio(workload: Workload, rounds: Sequence[dict[str, list[Sample]]]) -> Ratio:
    """Over all requests of all rounds, and the median round."""

    def of(rounds: Sequence[dict[str, list[Sample]]]) -> float:
        means = {mode: mean_ttft_s(sample for each in rounds for sample in each[mode]) for mode in MODES}
        return means["auto"] / min(means["split"], means["local"])

    median = statistics.median(of([each]) for each in rounds)
    return Ratio(
        name=f"TTFT learned / better, {workload.name}", best=of(rounds), median=median, bar=BAR, is_at_most=True
    )


def _tell(workload: Workload, samples: dict[str, list[Sample]]) -> None:
    print(f"{workload.name}: {len(samples['auto'])} requests")
    for mode in MODES:
        each = [sample for sample in samples[mode] if sample.is_ok]
        ways = Counter(sample.mode for sample in each)
        gaps = [gap for sample in each for gap in sample.itl_s] or [0.0]
        p95_s = quantile([sample.ttft_s for sample in each], 0.95)
        print(
            f"  {mode:6} TTFT mean {1e3 * mean_ttft_s(each):7.0f} ms, p95 {1e3 * p95_s:7.0f}"
            f"   ITL mean {1e3 * statistics.fmean(gaps):5.0f}, p99 {1e3 * quantile(gaps, 0.99):5.0f}"
            f"   {ways['split']} split, {ways['local']} local, {len(samples[mode]) - len(each)} failed"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.break_even", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer rounds")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="workloads whose name begins so")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="a measured table in the place of the built-in one")
    parser.add_argument("--real", action="store_true", help="whole mock workers, in real time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options = parser.parse_args()
    set_worker_environment(1)  # before torch
    if options.real:
        num_rounds, duration_s = (1, 8.0) if options.quick else (2, 25.0)
    else:
        num_rounds, duration_s = (2, 60.0) if options.quick else (3, 120.0)
    costs = COSTS if options.costs is None else read_costs(str(options.costs))
    chosen = [w for w in WORKLOADS if not options.only or w.name.startswith(tuple(options.only))]
    ratios, figures = [], {}
    for workload in chosen:
        rounds = []
        for seed in range(options.seed, options.seed + num_rounds):
            conversations = workload.make(random.Random(f"{workload.name} {seed}"), duration_s)
            if options.real:
                rounds.append(asyncio.run(compare_real(costs, conversations)))
            else:
                rounds.append(compare(costs, conversations, seed=seed))
        ratios.append(_ratio(workload, rounds))
        together = {mode: [sample for each in rounds for sample in each[mode]] for mode in MODES}
        _tell(workload, together)
        figures[workload.name] = {
            mode: [
                {"num_prompt_tokens": s.num_prompt_tokens, "ttft_s": s.ttft_s, "mode": s.mode, "outcome": s.outcome}
                for s in samples
            ]
            for mode, samples in together.items()
        }
    if options.json is not None:
        options.json.write_text(json.dumps({"samples": figures, "ratios": as_json(ratios)}, indent=2) + "\n")
    return show(ratios)


if __name__ == "__main__":
    sys.exit(main())
