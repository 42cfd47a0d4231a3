"""What placing by cached prefixes is worth: ``python -m bench.prefix_placement``.

Two dozen applications with a system prompt and examples each, whose users talk for some turns, on four mock workers
with the real schedulers and prefix caches; the cache of one holds a third of what all applications begin with. The same
conversations are played with ``router.policy`` ``round_robin`` and ``prefix_aware``, round by round. Bars are for
workers that read and answer; with ``--split`` prefill workers are measured too. Answers of both must be the same.

Hits are counted, but times are waited for, in one process: its *lag* says how late its event loop was on average. On a
machine that gives it less than it needs (a lag of more than a few ms) times are those of the machine.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from bench.cell import MockCell
from bench.traffic import Sample, mean_ttft_s, play, report
from bench.workloads import Lengths, SharedPrefix, poisson
from core.costs import StepCosts

COSTS = StepCosts.linear(fixed_s=0.02, prompt_token_s=6e-4, decode_row_s=5e-4)
"""1,700 prompt tokens a second: slow enough that two cores, even shared with others, are no part of what four workers
take."""
WORKLOAD = SharedPrefix(
    num_systems=24,
    system_tokens=768,
    num_shots=2,
    shot_tokens=128,
    turns=(1, 4),
    user=Lengths(median=48, sigma=0.6, shortest=4, longest=400),
    answer=Lengths(median=8, sigma=0.5, shortest=2, longest=40),
    think_s=0.5,
    skew=0.0,
)
CONVERSATIONS_PER_S = 3.0
NUM_BLOCKS = 448
CELLS = {"local": (0, 0, 4), "split": (4, 2, 0)}
"""Prefill, decode and unified workers."""
POLICIES = ("round_robin", "prefix_aware")
HIT_BAR, TTFT_BAR = 2.0, 0.5
LAG_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One workload under one policy."""

    cell: str
    policy: str
    seed: int
    num_requests: int
    hit_ratio: float
    """Of the prompt tokens that workers had to have."""
    mean_ttft_s: float
    lag_s: float
    """How late the event loop was, on average."""


async def measure(cell_name: str, policy: str, seed: int, duration_s: float) -> tuple[Played, list[Sample]]:
    """Print the row."""
    arrivals = list(poisson(random.Random(seed), per_s=CONVERSATIONS_PER_S, duration_s=duration_s))
    mode = "auto" if cell_name == "local" else "split"
    settings = (f"router.policy={policy}", f"router.mode={mode}", f"models.0.kv.num_blocks={NUM_BLOCKS}")
    prefill, decode, unified = CELLS[cell_name]
    async with MockCell(COSTS, *settings, prefill=prefill, decode=decode, unified=unified) as cell:
        lags: list[float] = []
        watching = asyncio.create_task(watch_lag(lags))
        samples = await play(cell.ask, WORKLOAD.conversations(arrivals, seed=seed))
        watching.cancel()
        played = Played(
            cell=cell_name,
            policy=policy,
            seed=seed,
            num_requests=len(samples),
            hit_ratio=cell.cache_hit_ratio(),
            mean_ttft_s=mean_ttft_s(samples),
            lag_s=statistics.fmean(lags),
        )
    print(f"{cell_name}, {policy}, seed {seed}, lag {1e3 * played.lag_s:.1f} ms: {report(samples)}", flush=True)
    failed = [sample.outcome for sample in samples if not sample.is_ok]
    assert not failed, f"requests failed: {failed}"
    return played, samples


async def watch_lag(lags: list[float]) -> None:
    """Until cancelled: how much later than asked for the event loop goes on."""
    while True:
        due = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append(time.monotonic() - due)


async def measure_all(cells: Sequence[str], seeds: Sequence[int], duration_s: float) -> list[Played]:
    rows: list[Played] = []
    for cell in cells:
        for seed in seeds:
            answers = []
            for policy in POLICIES:
                played, samples = await measure(cell, policy, seed, duration_s)
                rows.append(played)
                answers.append(sorted(sample.answer for sample in samples))
            assert answers[0] == answers[1], "answers depend on where they were made"
    return rows


def ratios(rows: Sequence[Played], cell: str) -> list[Ratio]:
    """Of prefix-aware over round robin, round by round."""
    plain, aware = ([row for row in rows if row.cell == cell and row.policy == policy] for policy in POLICIES)
    hits = [new.hit_ratio / old.hit_ratio for old, new in zip(plain, aware, strict=True)]
    ttfts = [new.mean_ttft_s / old.mean_ttft_s for old, new in zip(plain, aware, strict=True)]
    return [
        Ratio(
            name=f"{cell}: hit ratio over round robin's", best=max(hits), median=statistics.median(hits), bar=HIT_BAR
        ),
        Ratio(
            name=f"{cell}: mean TTFT over round robin's",
            best=min(ttfts),
            median=statistics.median(ttfts),
            bar=TTFT_BAR,
            is_at_most=True,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.prefix_placement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=16.0, help="seconds in which conversations begin")
    parser.add_argument("--split", action="store_true", help="measure a cell of prefill and decode workers too")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    cells = list(CELLS) if options.split else ["local"]
    seeds = range(1 if options.quick else options.rounds)
    rows = asyncio.run(measure_all(cells, seeds, options.duration))
    told = ratios(rows, "local")
    if options.json is not None:
        figures = {"rows": [asdict(row) for row in rows], "ratios": as_json(told)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    for ratio in ratios(rows, "split") if options.split else ():
        print(f"{ratio.name:42} {ratio.best:5.2f} (medians {ratio.median:5.2f})")
    return show(told)


if __name__ == "__main__":
    sys.exit(main())
