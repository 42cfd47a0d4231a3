"""The simulator against real clusters: ``python -m bench.simulator_accuracy``.

``mock`` is real processes with mock workers (2 prefill, 2 decode), ``cpu`` the default model on CPU (1 and 1, a core
each). Either way a profile is measured first, on one worker of each role (``baton profile``), and nothing else of the
cluster is told to the simulator. Then three workloads that the profile knows nothing of are played on both: medians of
TTFT and TPOT, their 99th percentiles, and the knee.

Real clusters share two cores with everything else that runs here: figures of a busy machine say nothing.
"""

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.bars import Ratio, as_json, show
from bench.client.endpoint import Asking, Endpoint
from bench.client.figures import Figures, Objective, figures
from bench.client.http import HttpClient
from bench.client.knee import find_knee
from bench.client.player import Player
from bench.client.prompts import Ids
from bench.client.scripts import Script, rescaled, salted
from bench.client.shapes import SHAPES, Shape
from bench.client.traces import clipped, read_trace
from bench.local_cluster import Live, config_of, running
from bench.sizing.fit import fit
from bench.sizing.measure import Sizes, measure
from bench.sizing.model import Split
from bench.sizing.profile import Profile
from bench.sizing.profile_command import with_facts, worker_of
from bench.sizing.simulate import Simulated, at_rate, simulate
from bench.workloads import Lengths
from core.costs import HandoffCosts, StepCosts

HERE = Path(__file__).parent
BARS = {"p50": 1.10, "p99": 1.25}
KNEE_BAR = 1.15
SHARE = 0.9
MOCK_COSTS = StepCosts.linear(
    fixed_s=0.02,
    prompt_token_s=2e-4,
    decode_row_s=5e-4,
    decode_position_s=5e-7,
    prompt_pair_s=1e-8,
    handoff=HandoffCosts(fixed_s=0.01, token_s=1e-5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    settings: tuple[str, ...]
    split: Split
    longest: int
    """Tokens of a request."""
    busy: float
    """Share of the capacity (as simulated) at which latencies are compared."""

    def config(self, split: Split) -> tuple[str, ...]:
        return (
            *self.settings,
            "router.mode=split",
            f"models.0.pools.prefill.replicas={split.prefill}",
            f"models.0.pools.decode.replicas={split.decode}",
        )


TARGETS = {
    "mock": Target(
        name="mock",
        settings=(f"models.0.execution={{kind: mock, costs: {MOCK_COSTS.model_dump_json()}}}",),
        split=Split(prefill=2, decode=2),
        longest=2000,
        busy=0.6,
    ),
    "cpu": Target(name="cpu", settings=(), split=Split(prefill=1, decode=1), longest=400, busy=0.6),
}


def workloads(longest: int) -> dict[str, list[Script]]:
    """Short chat, a slice of Azure's conversations, and shared beginnings; none is what a profile is measured with."""
    median = longest / 10
    plain = Shape(
        prompt=Lengths(median=median, sigma=0.5),
        answer=Lengths(median=median / 4, sigma=0.4, shortest=4),
        shared=Lengths(median=2 * median),
        num_shared=4,
    )
    azure = read_trace(HERE / "traces" / "azure_2023_conv_1500.csv.gz", limit=400)
    found = {
        "chat": list(itertools.islice(SHAPES["random"](plain), 400)),
        "azure": azure,
        "shared": list(itertools.islice(SHAPES["shared-prefix"](plain), 400)),
    }
    return {name: clipped(scripts, longest=longest // 2) for name, scripts in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure of both, in seconds or requests a second."""

    name: str
    real: float
    simulated: float
    bar: float

    @property
    def ratio(self) -> Ratio:
        apart = self.simulated / self.real if self.real and self.simulated else float("inf")
        apart = max(apart, 1 / apart) if apart else float("inf")
        return Ratio(name=f"{self.name}: apart by", best=apart, median=apart, bar=self.bar, is_at_most=True)


async def profiled(live: Live, target: Target, repeats: int) -> Profile:
    client = HttpClient(live.url)
    try:
        worker, has_handoff = await worker_of(live.router)
        sizes = Sizes.within(
            max_step_tokens=min(target.longest, worker.max_step_tokens),
            max_sequences=min(16, worker.max_sequences),
            max_context=worker.model.max_context,
            repeats=repeats,
        )
        measured = await measure(_endpoint(client, live), sizes, has_handoff=has_handoff)
    finally:
        client.close()
    return with_facts(fit(measured, where=target.name), worker, model=live.model, hardware=target.name)


def _endpoint(client: HttpClient, live: Live) -> Endpoint:
    return Endpoint(client, Asking(model=live.model, words=Ids()))


async def played(live: Live, scripts: Sequence[Script], objective: Objective) -> Figures:
    client = HttpClient(live.url)
    try:
        run = await Player(_endpoint(client, live)).play(scripts)
    finally:
        client.close()
    found = figures(run, objective)
    if found.num_ok != len(scripts):
        raise RuntimeError(f"requests failed: {found.errors}")
    return found


def compared(name: str, real: Figures, simulated: Simulated) -> list[Pair]:
    samples = simulated.samples
    ttft = [sample.ttft_s for sample in samples]
    tpot = [sample.tpot_s for sample in samples if len(sample.answer) > 1]
    return [
        Pair(
            name=f"{name}: {what} {label}",
            real=spread.percentiles[percentile],
            simulated=float(np.percentile(values, percentile)),
            bar=BARS[label],
        )
        for what, spread, values in (("TTFT", real.ttft, ttft), ("TPOT", real.tpot, tpot))
        for label, percentile in (("p50", 50), ("p99", 99))
    ]


async def judge(target: Target, *, number: int, knees: bool, repeats: int) -> list[Pair]:
    """Of one target: profile, play, compare."""
    one_each = Split(prefill=1, decode=1)
    async with running(config_of(*target.config(one_each))) as live:
        profile = await profiled(live, target, repeats)
    for each in profile.fits:
        print(f"{target.name}: {each.name} R2 {each.r2:.4f}", flush=True)
    pairs: list[Pair] = []
    async with running(config_of(*target.config(target.split))) as live:
        for round_number, (name, scripts) in enumerate(workloads(target.longest).items()):
            rate = target.busy * _capacity(profile, target.split, scripts)
            arriving = salted(at_rate(scripts, rate, number=number), f"round {round_number}")
            real = await played(live, arriving, Objective())
            found = compared(f"{target.name} {name}", real, simulate(profile, target.split, arriving))
            if knees:
                objective = Objective(ttft_s=3 * real.ttft.median, tpot_s=1.6 * real.tpot.median)
                found.append(await _knee(live, profile, target, name, scripts, objective, rate, number))
            pairs += found
            for pair in found:
                print(f"{pair.name}: real {pair.real:.4g}, simulated {pair.simulated:.4g}", flush=True)
    return pairs


async def _knee(
    live: Live,
    profile: Profile,
    target: Target,
    name: str,
    scripts: Sequence[Script],
    objective: Objective,
    rate: float,
    number: int,
) -> Pair:
    """Of the same arrivals, faster and slower, on both."""
    arriving = at_rate(scripts, rate, number=number)

    async def real(each: float) -> Figures:
        return await played(live, salted(rescaled(arriving, rate=each), f"knee {name} {each}"), objective)

    def is_met(each: float) -> bool:
        run = simulate(profile, target.split, rescaled(arriving, rate=each))
        return sum(1 for sample in run.samples if _meets(objective, sample.ttft_s, sample.tpot_s)) >= SHARE * number

    knee, _ = await find_knee(real, from_rate=rate, share=SHARE, precision=0.06, most=8)
    low, high = rate / 16, rate * 16
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return Pair(name=f"{target.name} {name}: knee", real=knee, simulated=low, bar=KNEE_BAR)


def _meets(objective: Objective, ttft_s: float, tpot_s: float) -> bool:
    return ttft_s <= objective.ttft_s and tpot_s <= objective.tpot_s


def _capacity(profile: Profile, split: Split, scripts: Sequence[Script]) -> float:
    """Requests a second when all are asked at once, as simulated."""
    at_once = [replace(script, at_s=0.0) for script in scripts[:200]]
    run = simulate(profile, split, at_once)
    return len(run.samples) / max(sample.sent_s + sample.e2e_s for sample in run.samples)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.simulator_accuracy", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="of each run; default: 200")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of the profile")
    parser.add_argument("--no-knee", dest="knee", action="store_false", help="latencies alone")
    parser.add_argument("--quick", action="store_true", help="mock workers, 40 requests, no knees")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.target, options.requests, options.repeats, options.knee = ["mock"], 40, 3, False
    pairs = []
    for name in options.target:
        pairs += asyncio.run(judge(TARGETS[name], number=options.requests, knees=options.knee, repeats=options.repeats))
    found = [pair.ratio for pair in pairs]
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": as_json(found)}, indent=2) + "\n")
    return show(found)


if __name__ == "__main__":
    sys.exit(main())
