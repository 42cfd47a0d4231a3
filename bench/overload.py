"""Three times more requests than a cell can serve: ``python -m bench.overload``.

A cell of mock workers (2 prefill, 2 decode; real router, pipeline, schedulers and hand-offs) is asked open-loop by two
tenants in three priority classes. First what it can do at all is measured, then its goodput (requests a second that
meet the objective) over a sweep of loads up to that, then three times as much. Said last:

- goodput at 3x over the best of the sweep,
- the high class' TTFT (p95) at 3x over that at 0.7x,
- the share of refusals that come at once (within 50 ms): the others waited first, and somebody with a better right
  came; and how many requests ended in anything but an answer or a refusal,
- what waits, at most, over what may; and how much the process has grown.
"""

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from bench.cell import MockCell
from bench.load import quantile
from bench.traffic import Conversation, Sample, Slo, goodput, play
from bench.workloads import Lengths, independent, poisson
from core.config import DEFAULT_MODEL
from core.costs import StepCosts
from core.priority import PriorityClass

COSTS = StepCosts.linear(fixed_s=0.02, prompt_token_s=1e-3, decode_row_s=1e-3)
PROMPT, ANSWER = Lengths(median=200, sigma=0.4, longest=800), Lengths(median=16, sigma=0.4, longest=48)
SLO = Slo(ttft_s=2.5, tpot_s=0.2)
MAX_WAITING, MAX_WAIT_S = 64, 1.0
SETTINGS = (
    f"router.max_waiting={MAX_WAITING}",
    f"router.max_wait_s={MAX_WAIT_S}",
    "router.prefill_backlog_s=0.5",
    "models.0.pools.prefill.policy=priority",
    "models.0.pools.decode.policy=priority",
    "models.0.pools.prefill.max_step_tokens=256",
    "models.0.pools.decode.max_sequences=16",
    "router.mode=split",
)
MIX = (
    ("high", PriorityClass.HIGH, "a", 0.1),
    ("normal", PriorityClass.NORMAL, "a", 0.5),
    ("other", PriorityClass.NORMAL, "b", 0.2),
    ("low", PriorityClass.LOW, "b", 0.2),
)
"""(label, class, tenant, share of the load)."""
AT_ONCE_S = 0.05
SWEEP = (0.7, 0.85, 1.0)
REFUSED = frozenset({"too_many_waiting", "overloaded", "queue_full", "no_worker"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One load, played to its end."""

    per_s: float
    duration_s: float
    samples: list[Sample]
    most_waiting: int

    @property
    def goodput(self) -> float:
        return goodput(self.samples, SLO, duration_s=self.duration_s)

    @property
    def refused(self) -> list[Sample]:
        return [each for each in self.samples if each.outcome in REFUSED]

    def ttft_s(self, label: str, q: float) -> float:
        """Infinite where one of those that count was not answered."""
        return quantile([each.ttft_s for each in self.samples if each.label == label], q)

    def figures(self) -> dict[str, object]:
        return {
            "per_s": round(self.per_s, 2),
            "goodput": round(self.goodput, 2),
            "answered_per_s": round(sum(each.is_ok for each in self.samples) / self.duration_s, 2),
            "outcomes": dict(Counter(each.outcome for each in self.samples)),
            "good_of": {label: round(_share_good(self.samples, label), 3) for label, *_ in MIX},
            "ttft_p95_s": {label: round(self.ttft_s(label, 0.95), 3) for label, *_ in MIX},
            "most_waiting": self.most_waiting,
        }


def _share_good(samples: Sequence[Sample], label: str) -> float:
    mine = [each for each in samples if each.label == label]
    return sum(map(SLO.is_met, mine)) / max(1, len(mine))


def traffic(per_s: float, duration_s: float, *, seed: int) -> list[Conversation]:
    """The mix at ``per_s`` requests a second in all."""
    asked: list[Conversation] = []
    for number, (label, priority, tenant, share) in enumerate(MIX):
        choose = random.Random(f"{seed} {label}")
        asked += independent(
            list(poisson(choose, per_s=per_s * share, duration_s=duration_s)),
            prompt=PROMPT,
            answer=ANSWER,
            seed=seed * 10 + number,
            label=label,
            tenant=tenant,
            priority=priority.rank(0),
            deadline_s=30.0,
        )
    return asked


async def run(cell: MockCell, per_s: float, duration_s: float, *, seed: int) -> Phase:
    most_waiting, is_over = 0, asyncio.Event()

    async def watch() -> None:
        nonlocal most_waiting
        while not is_over.is_set():
            most_waiting = max(most_waiting, (await cell.router_server.handler.status()).num_waiting)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    samples = await play(cell.ask, traffic(per_s, duration_s, seed=seed))
    is_over.set()
    await watching
    phase = Phase(per_s=per_s, duration_s=duration_s, samples=samples, most_waiting=most_waiting)
    print(f"{per_s:6.1f}/s for {duration_s:g} s: {json.dumps(phase.figures())}", flush=True)
    return phase


async def measure(*, phase_s: float, overload_s: float, model: str) -> tuple[list[Phase], Phase, float]:
    """The sweep, the overload, and by how many MiB the process grew in it."""
    async with MockCell(COSTS, *SETTINGS, prefill=2, decode=2, model=model) as cell:
        await run(cell, 5.0, min(phase_s, 4.0), seed=1)  # costs are learned, code is warm
        first = await run(cell, 24.0, phase_s, seed=2)
        capacity = sum(each.is_ok for each in first.samples) / phase_s
        sweep = [await run(cell, share * capacity, phase_s, seed=3 + n) for n, share in enumerate(SWEEP)]
        gc.collect()
        before = _resident_mib()
        over = await run(cell, 3 * capacity, overload_s, seed=9)
        grown = _resident_mib() - before
    return sweep, over, grown


def _resident_mib() -> float:
    """At most, ever; a process that stays small does not raise it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ratios(sweep: Sequence[Phase], over: Phase, grown_mib: float) -> list[Ratio]:
    def one(name: str, value: float, bar: float, *, is_at_most: bool = True) -> Ratio:
        return Ratio(name=name, best=value, median=value, bar=bar, is_at_most=is_at_most)

    peak = max(phase.goodput for phase in sweep)
    refused = over.refused
    at_once = sum(each.e2e_s <= AT_ONCE_S for each in refused) / max(1, len(refused))
    calm, hot = sweep[0].ttft_s("high", 0.95), over.ttft_s("high", 0.95)
    unexplained = sum(not each.is_ok and each.outcome not in REFUSED for each in over.samples)
    return [
        one("goodput at 3x / best of the sweep", over.goodput / peak, 0.9, is_at_most=False),
        one("high class TTFT p95, 3x / 0.7x", hot / calm, 1.5),
        one("share of refusals that came at once", at_once, 0.9, is_at_most=False),
        one("requests that ended in anything else", unexplained, 0),
        one("most that waited / router.max_waiting", over.most_waiting / (MAX_WAITING + 2), 1.0),
        one("growth of the process at 3x, MiB", grown_mib, 64.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.overload", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short phases, 10 s of overload")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="lends its tokenizer (%(default)s)")
    options = parser.parse_args()
    phase_s, overload_s = (5.0, 10.0) if options.quick else (20.0, 60.0)
    sweep, over, grown = asyncio.run(measure(phase_s=phase_s, overload_s=overload_s, model=options.model))
    found = ratios(sweep, over, grown)
    if options.json is not None:
        figures = {"sweep": [each.figures() for each in sweep], "overload": over.figures(), "ratios": as_json(found)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return show(found)


if __name__ == "__main__":
    sys.exit(main())
