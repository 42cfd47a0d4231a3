"""What a client sees of a whole cluster on this machine, or with ``--url`` of one that runs already:
``python -m bench.cluster``. No bar: there is nothing beside it.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import httpx

from bench.load import Sample, Workload, report, run_load
from bench.local_cluster import config_of, running
from core.config import ClusterConfig, load_config
from core.errors import ServingError


async def measure(url: str, model: str, workload: Workload) -> tuple[list[Sample], float]:
    await run_load(url, model, Workload(num_requests=2, concurrency=1, prompt_words=8, max_tokens=4, seed=1))  # warm up
    samples, elapsed_s = await run_load(url, model, workload)
    print(report(samples, elapsed_s))
    return samples, elapsed_s


async def measure_own_cluster(config: ClusterConfig, workload: Workload) -> tuple[list[Sample], float]:
    """Start plain processes on free ports, measure, stop them."""
    async with running(config) as live:
        return await measure(live.url, live.model, workload)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cluster", description=__doc__)
    parser.add_argument("--url", help="a running gateway; without it an own cluster is started and stopped")
    parser.add_argument("--model", help="with --url: the model's name")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the own cluster")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="half of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options = parser.parse_args()
    workload = Workload(
        num_requests=max(1, options.requests // 2) if options.quick else options.requests,
        concurrency=options.concurrency,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
    )
    try:
        if options.url:
            samples, elapsed_s = asyncio.run(
                measure(options.url, options.model or load_config().models[0].name, workload)
            )
        else:
            samples, elapsed_s = asyncio.run(measure_own_cluster(config_of(*options.set), workload))
    except (ServingError, httpx.HTTPError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        figures = {"workload": asdict(workload), "elapsed_s": elapsed_s, "samples": [asdict(each) for each in samples]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
