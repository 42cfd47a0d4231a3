"""Split, unsplit or what the router thinks is better, on the same two workers: ``python -m bench.split_or_not``.

Three clusters play the same workloads one after the other, each twice (A B C C B A): one prefill and one decode worker
that always split, the same two that decide for each request (``router.mode=auto``), and two unified ones with chunked
prompts. Two cores either way, one for each worker. TTFT, TPOT, every gap between tokens, and the share of requests that
meet the workload's objectives; where splitting loses, the row says so.

``--simulated`` plays them on the simulator instead: the same on any machine, in seconds.
"""

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.bars import Ratio, as_json, show
from bench.client.endpoint import Asking, Endpoint
from bench.client.figures import Objective, figures
from bench.client.http import HttpClient
from bench.client.player import Player
from bench.client.prompts import Ids
from bench.client.scripts import Script, salted
from bench.client.shapes import SHAPES, Shape
from bench.local_cluster import Live, config_of, running
from bench.simulator_accuracy import MOCK_COSTS
from bench.sizing.model import Split
from bench.sizing.profile import Profile
from bench.sizing.simulate import at_rate, is_met, simulate
from bench.workloads import Lengths

ITL_BAR = 0.7
"""p99 of the gaps between tokens, split over unsplit, where long prompts come among chat."""
GOODPUT_BAR = 0.9
"""What the deciding cluster reaches of the better of the two others, in each workload."""
PAIR = "models.0.pools={prefill: {replicas: 1}, decode: {replicas: 1}}"
CLUSTERS: dict[str, tuple[str, ...]] = {
    "split": ("router.mode=split", PAIR),
    "auto": ("router.mode=auto", PAIR),
    "unsplit": ("models.0.pools={unified: {replicas: 2}}",),
}
SPLITS = {
    "split": (Split(prefill=1, decode=1), "split"),
    "auto": (Split(prefill=1, decode=1), "auto"),
    "unsplit": (Split(unified=2), "local"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    shape: str
    prompt: float
    answer: float
    rate: float
    objective: Objective
    loses: str = ""
    """Why splitting should not pay here."""

    def scripts(self, number: int) -> list[Script]:
        shape = Shape(
            prompt=Lengths(median=self.prompt, sigma=0.4, longest=3000),
            answer=Lengths(median=self.answer, sigma=0.3, longest=400),
            long=Lengths(median=1500, sigma=0.2, longest=3000),
            long_share=0.15,
            shared=Lengths(median=600),
            num_shared=2,
        )
        return at_rate(list(itertools.islice(SHAPES[self.shape](shape), number)), self.rate, number=number)


WORKLOADS = (
    Workload(
        name="long prompts among chat", shape="mixed", prompt=100, answer=40, rate=1.5,
        objective=Objective(ttft_s=1.0, tpot_s=0.045),
    ),
    Workload(
        name="long answers", shape="random", prompt=600, answer=80, rate=1.5,
        objective=Objective(ttft_s=0.6, tpot_s=0.045),
    ),
    Workload(
        name="short answers", shape="random", prompt=800, answer=4, rate=4.0,
        objective=Objective(ttft_s=0.6, tpot_s=0.08), loses="one worker reads, the other has nothing to write",
    ),
    Workload(
        name="short prompts", shape="random", prompt=40, answer=40, rate=4.0,
        objective=Objective(ttft_s=0.3, tpot_s=0.045), loses="a hand-off costs more than the prompt",
    ),
    Workload(
        name="shared beginnings", shape="shared-prefix", prompt=30, answer=40, rate=4.0,
        objective=Objective(ttft_s=0.3, tpot_s=0.045), loses="most of a prompt is cached where it is written",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of one cluster and workload. Seconds; the share of requests that met the objectives."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p99: float
    attainment: float

    @classmethod
    def mean(cls, several: Sequence["Seen"]) -> "Seen":
        return cls(**{name: statistics.fmean(getattr(one, name) for one in several) for name in cls.__slots__})


Table = dict[str, dict[str, Seen]]
"""By workload and cluster."""


async def real(workloads: Sequence[Workload], number: int, settings: Sequence[str]) -> Table:
    seen: dict[str, dict[str, list[Seen]]] = {each.name: {name: [] for name in CLUSTERS} for each in workloads}
    for turn, name in enumerate([*CLUSTERS, *reversed(CLUSTERS)]):
        async with running(config_of(*settings, *CLUSTERS[name])) as live:
            for each in workloads:
                seen[each.name][name].append(await _played(live, each, number, salt=f"{turn} {each.name}"))
                print(f"{name}, {each.name}: {seen[each.name][name][-1]}", file=sys.stderr, flush=True)
    return {name: {cluster: Seen.mean(runs) for cluster, runs in row.items()} for name, row in seen.items()}


async def _played(live: Live, workload: Workload, number: int, *, salt: str) -> Seen:
    client = HttpClient(live.url)
    try:
        endpoint = Endpoint(client, Asking(model=live.model, words=Ids()))
        run = await Player(endpoint).play(salted(workload.scripts(number), salt))
    finally:
        client.close()
    found = figures(run, workload.objective)
    return Seen(
        ttft_p50=found.ttft.median,
        ttft_p99=found.ttft.percentiles[99],
        tpot_p50=found.tpot.median,
        itl_p99=found.itl.percentiles[99],
        attainment=found.attainment,
    )


def simulated(workloads: Sequence[Workload], number: int, profile: Profile) -> Table:
    table: Table = {}
    for each in workloads:
        table[each.name] = {}
        for name, (split, mode) in SPLITS.items():
            samples = simulate(profile, split, each.scripts(number), mode=mode).samples
            gaps = [gap for sample in samples for gap in sample.itl_s]
            ttft = [sample.ttft_s for sample in samples]
            table[each.name][name] = Seen(
                ttft_p50=float(np.percentile(ttft, 50)),
                ttft_p99=float(np.percentile(ttft, 99)),
                tpot_p50=float(np.percentile([sample.tpot_s for sample in samples], 50)),
                itl_p99=float(np.percentile(gaps, 99)),
                attainment=sum(is_met(each.objective, sample) for sample in samples) / len(samples),
            )
    return table


def markdown(table: Table, workloads: Sequence[Workload]) -> str:
    lines = [
        "| workload | cluster | TTFT p50 (ms) | p99 | TPOT p50 (ms) | ITL p99 (ms) | attainment | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in workloads:
        row = table[each.name]
        for name, seen in row.items():
            milliseconds = (seen.ttft_p50, seen.ttft_p99, seen.tpot_p50, seen.itl_p99)
            cells = " | ".join(f"{1e3 * value:.1f}" for value in milliseconds)
            lines.append(f"| {each.name} | {name} | {cells} | {seen.attainment:.0%} | {_remark(each, name, row)} |")
    return "\n".join(lines) + "\n"


def _remark(workload: Workload, name: str, row: dict[str, Seen]) -> str:
    if name != "split":
        return ""
    better: list[tuple[str, Callable[[Seen], float]]] = [
        ("TTFT", lambda seen: seen.ttft_p50),
        ("ITL p99", lambda seen: seen.itl_p99),
        ("attainment", lambda seen: -seen.attainment),
    ]
    lost = [what for what, value in better if value(row["split"]) > value(row["unsplit"]) + 1e-9]
    if not lost:
        return "splitting wins"
    return f"**splitting loses**: {', '.join(lost)}" + (f" ({workload.loses})" if workload.loses else "")


def ratios(table: Table) -> list[Ratio]:
    found = []
    first = table.get(WORKLOADS[0].name)
    if first is not None:
        itl = first["split"].itl_p99 / first["unsplit"].itl_p99
        found.append(Ratio(name="ITL p99, split over unsplit", best=itl, median=itl, bar=ITL_BAR, is_at_most=True))
    for name, row in table.items():
        better = max(row["split"].attainment, row["unsplit"].attainment)
        kept = row["auto"].attainment / better if better else math.inf
        found.append(Ratio(name=f"{name}: auto over the better", best=kept, median=kept, bar=GOODPUT_BAR))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.split_or_not", description=__doc__)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--mock", action="store_true", help="mock workers in place of the model, in real processes")
    parser.add_argument("--requests", type=int, default=150, metavar="N", help="of each workload and run")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in WORKLOADS], metavar="WORKLOAD")
    parser.add_argument("--quick", action="store_true", help="simulated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    chosen = [each for each in WORKLOADS if options.only is None or each.name in options.only]
    if options.simulated or options.quick:
        table = simulated(chosen, options.requests, Profile(costs=MOCK_COSTS))
    else:
        settings = [f"models.0.execution={{kind: mock, costs: {MOCK_COSTS.model_dump_json()}}}"] if options.mock else []
        table = asyncio.run(real(chosen, options.requests, settings))
    print(markdown(table, chosen))
    found = ratios(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": as_json(found)}, indent=2) + "\n")
    return show(found)


if __name__ == "__main__":
    sys.exit(main())
