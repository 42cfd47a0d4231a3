"""Replays a trace on mock clusters of several sizes in virtual time, one process each: no request is lost or hangs, and
what a request costs router and gateway is printed over the number of workers. ``python -m bench.virtual_cluster``.

Router, gateway pipeline, hand-offs, schedulers, pools and prefix caches are the product's; messages to the router are
encoded and decoded. HTTP, text and the sockets of gRPC are not in it.
"""

import argparse
import asyncio
import collections
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from bench.client.conversations import conversations
from bench.client.prompts import Ids
from bench.client.scripts import Script
from bench.client.svg import Series, plot
from bench.client.traces import read_trace, window
from bench.load import quantile
from bench.sizing.profile import read_profile
from bench.traffic import Sample, hit_ratio
from bench.virtual.cluster import MockCluster
from bench.virtual.loop import VirtualLoop
from core.costs import StepCosts

HERE = Path(__file__).parent
TRACE = HERE / "traces" / "mooncake_conversation_2min.jsonl.gz"
PROFILE = HERE / "profiles" / "qwen3-8b-h200-computed.json"
SIZES = (8, 16, 32, 64)
PREFILL_SHARE = 0.5
NUM_BLOCKS = 48_000
"""Of 16 tokens: the KV of Qwen3-8B that an H200 holds."""
MAX_CONTEXT = 1 << 18
GROWTH_BAR = 4.0
"""Of the router's CPU time for a request, from the fewest workers to the most (eight times as many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    num_workers: int
    num_requests: int
    outcomes: dict[str, int]
    gateway_us: float
    """CPU time for each request: pipeline, block hashes, codec of its calls to the router."""
    router_us: float
    """Likewise, heartbeats of workers and the sweep excluded: they are paid for by time and not by requests."""
    router_idle_us: float
    """CPU time of the router in a second without requests."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    hit_ratio: float
    virtual_s: float
    cpu_s: float


async def replay(scripts: Sequence[Script], costs: StepCosts, num_workers: int, *overrides: str) -> Outcome:
    """Within a metered virtual loop."""
    num_prefill = round(PREFILL_SHARE * num_workers)
    cluster = MockCluster(
        costs,
        f"models.0.kv.num_blocks={NUM_BLOCKS}",
        "models.0.pools.decode.max_sequences=256",
        *overrides,
        prefill=num_prefill,
        decode=num_workers - num_prefill,
        max_context=MAX_CONTEXT,
    )
    began_cpu, loop = time.process_time(), asyncio.get_running_loop()
    await cluster.ready()
    idle_s, before = 10.0, cluster.router.cpu_s
    await asyncio.sleep(idle_s)
    idle_rate = (cluster.router.cpu_s - before) / idle_s
    began, before, gateway_before = loop.time(), cluster.router.cpu_s, cluster.gateway.cpu_s
    samples = await cluster.play(conversations(scripts, Ids()))
    virtual_s = loop.time() - began
    router_s = cluster.router.cpu_s - before - idle_rate * virtual_s
    gateway_s = cluster.gateway.cpu_s - gateway_before
    await cluster.idle()
    await cluster.close()
    return _outcome(num_workers, samples, router_s, gateway_s, idle_rate, virtual_s, time.process_time() - began_cpu)


def _outcome(
    num_workers: int,
    samples: Sequence[Sample],
    router_s: float,
    gateway_s: float,
    idle_rate: float,
    virtual_s: float,
    cpu_s: float,
) -> Outcome:
    good = [sample for sample in samples if sample.is_ok]
    return Outcome(
        num_workers=num_workers,
        num_requests=len(samples),
        outcomes=dict(collections.Counter(sample.outcome for sample in samples)),
        gateway_us=1e6 * gateway_s / len(samples),
        router_us=1e6 * router_s / len(samples),
        router_idle_us=1e6 * idle_rate,
        ttft_p50_s=quantile([sample.ttft_s for sample in good], 0.5),
        ttft_p99_s=quantile([sample.ttft_s for sample in good], 0.99),
        tpot_p50_s=quantile([sample.tpot_s for sample in good], 0.5),
        hit_ratio=hit_ratio(good),
        virtual_s=virtual_s,
        cpu_s=cpu_s,
    )


def run_one(options: argparse.Namespace, num_workers: int) -> Outcome:
    """In this process."""
    scripts = window(read_trace(options.trace), duration_s=options.duration)
    loop = VirtualLoop(is_metered=True)
    outcome = loop.run(replay(scripts, read_profile(options.profile).costs, num_workers))
    if outcome.num_requests != len(scripts):
        raise RuntimeError(f"{len(scripts)} requests were to be played, {outcome.num_requests} have ended")
    if loop.errors:
        raise RuntimeError(f"something broke on the loop: {loop.errors[0]}")
    return outcome


def ratios(outcomes: Sequence[Outcome]) -> list[Ratio]:
    lost = sum(number for each in outcomes for name, number in each.outcomes.items() if name != "ok")
    few, many = outcomes[0], outcomes[-1]
    growth = many.router_us / few.router_us
    name = f"router's CPU for a request, {many.num_workers} over {few.num_workers} workers"
    return [
        Ratio(name="requests that were lost or hung", best=lost, median=lost, bar=0, is_at_most=True),
        Ratio(name=name, best=growth, median=growth, bar=GROWTH_BAR, is_at_most=True),
    ]


def growth_plot(outcomes: Sequence[Outcome]) -> str:
    return plot(
        "CPU time of a request over the number of workers",
        [
            Series(name="router", points=[(each.num_workers, each.router_us) for each in outcomes]),
            Series(name="gateway", points=[(each.num_workers, each.gateway_us) for each in outcomes]),
        ],
        x_label="workers",
        y_label="us",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.virtual_cluster", description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="default: two minutes of Mooncake's conversations")
    parser.add_argument("--duration", type=float, default=float("inf"), metavar="S", help="of the trace")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="what steps take, or a cost table")
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="how the cost of a request grows")
    parser.add_argument("--quick", action="store_true", help="8 and 64 workers, 20 s of the trace")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.workers, options.duration = (8, 64), min(20.0, options.duration)
    if options.one is not None:
        print(json.dumps(asdict(run_one(options, options.one))))
        return 0
    outcomes = []
    for number in options.workers:
        found = _in_a_process(options, number)
        outcomes.append(found)
        print(
            f"{number:3} workers: {found.num_requests} requests {found.outcomes}, router {found.router_us:.0f} us and "
            f"gateway {found.gateway_us:.0f} us CPU a request, router idle {found.router_idle_us / 1e4:.2f} % of a "
            f"core, TTFT p50 {found.ttft_p50_s:.2f} p99 {found.ttft_p99_s:.2f} s, TPOT p50 "
            f"{1e3 * found.tpot_p50_s:.1f} ms, {found.hit_ratio:.0%} of prompt tokens cached, "
            f"{found.virtual_s:.0f} s in {found.cpu_s:.0f} s of CPU",
            flush=True,
        )
    if options.svg is not None:
        options.svg.write_text(growth_plot(outcomes))
    judged = ratios(outcomes)
    if options.json is not None:
        figures = {"sizes": [asdict(each) for each in outcomes], "ratios": as_json(judged)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return show(judged)


def _in_a_process(options: argparse.Namespace, number: int) -> Outcome:
    """So that one size leaves nothing to the next: memory, caches, the state of the garbage collector."""
    command = [sys.executable, "-m", "bench.virtual_cluster", "--one", str(number), "--trace", str(options.trace)]
    command += ["--duration", str(options.duration), "--profile", str(options.profile)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Outcome(**json.loads(text.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
