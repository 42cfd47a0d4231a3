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
from core.config import ClusterConfig, load_config
from core.errors import ServingError
from deploy.cluster import Cluster, resolve_ports
from deploy.launcher import ComponentState, LaunchError
from deploy.process import ProcessLauncher

READY_POLL_S = 0.2


async def measure(url: str, model: str, workload: Workload) -> tuple[list[Sample], float]:
    await run_load(url, model, Workload(num_requests=2, concurrency=1, prompt_words=8, max_tokens=4, seed=1))  # warm up
    samples, elapsed_s = await run_load(url, model, workload)
    print(report(samples, elapsed_s))
    return samples, elapsed_s


async def measure_own_cluster(config: ClusterConfig, workload: Workload) -> tuple[list[Sample], float]:
    """Start plain processes on free ports, measure, stop them."""
    config = resolve_ports(config)
    url = f"http://{config.gateway.listen}"
    async with ProcessLauncher() as launcher:
        names = set(await Cluster(config, launcher).start())
        async for event in launcher.events():
            if event.state is ComponentState.FAILED:
                raise LaunchError(f"{event.component}: {event.message}")
            if event.state is ComponentState.READY:
                names.discard(event.component)
                if not names:
                    break
        async with asyncio.timeout(config.launcher.start_timeout_s), httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{url}/ready")).is_error:
                await asyncio.sleep(READY_POLL_S)
        return await measure(url, config.models[0].name, workload)


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
            free_ports = ["gateway.listen=127.0.0.1:0", "router.listen=127.0.0.1:0"]
            config = load_config(overrides=[*free_ports, *options.set])
            samples, elapsed_s = asyncio.run(measure_own_cluster(config, workload))
    except (ServingError, httpx.HTTPError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        figures = {"workload": asdict(workload), "elapsed_s": elapsed_s, "samples": [asdict(each) for each in samples]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
