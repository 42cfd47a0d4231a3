"""What being seen costs: ``python -m bench.telemetry``. Two clusters of this machine, alike but for telemetry.

On: every request is traced to a collector over OTLP, and every process is scraped each second. Off: neither. Both serve
the same work, ``--streams`` streamed requests at once, in turns: off, on, on, off. What counts is CPU time, by the
scheduler's own account of all threads: of the decode worker relative to without, and of the gateway in microseconds for
each token, whole requests (spans, records, metrics) included. The bound is the upper end of a one-sided 95 % confidence
interval of the mean difference between the turns. Exit status 1 when a bound is over its bar.
"""

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.load import Workload, run_load
from core.config import ClusterConfig, load_config
from core.errors import ServingError
from core.types import ClusterStatus
from deploy.cluster import Cluster, resolve_ports
from deploy.launcher import ComponentState, LaunchError
from deploy.process import ProcessLauncher
from rpc.clients import RouterClient

MAX_DECODE_SHARE = 0.03
MAX_GATEWAY_US = 2.0
READY_POLL_S, SCRAPE_S = 0.2, 1.0
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Student's t, one-sided 95 %, by degrees of freedom from 1 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """CPU microseconds for each token of the answers."""

    is_on: bool
    decode_us: float
    gateway_us: float


class Collector:
    """Takes spans over HTTP, and counts their bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as long as it lasts."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split()[0])
                self.num_bytes += len(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()


class Running:
    """One cluster, from start to stop."""

    def __init__(self, config: ClusterConfig, status: ClusterStatus, *, is_on: bool) -> None:
        self.config, self.is_on = config, is_on
        (worker,), (gateway,) = status.workers, status.gateways
        self._worker_pid, self._gateway_pid = worker.registration.pid, gateway.pid
        self._probes = (worker.registration.http_address, status.router_http_address, gateway.http_address)

    async def turn(self, workload: Workload) -> Turn:
        scraping = asyncio.create_task(self._scrape()) if self.is_on else None
        before = [cpu_s(pid) for pid in (self._worker_pid, self._gateway_pid)]
        samples, _ = await run_load(f"http://{self.config.gateway.listen}", self.config.models[0].name, workload)
        after = [cpu_s(pid) for pid in (self._worker_pid, self._gateway_pid)]
        if scraping is not None:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
        num_tokens = sum(sample.num_completion_tokens for sample in samples)
        decode_us, gateway_us = (1e6 * (end - start) / num_tokens for start, end in zip(before, after, strict=True))
        return Turn(is_on=self.is_on, decode_us=decode_us, gateway_us=gateway_us)

    async def _scrape(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                for address in self._probes:
                    (await client.get(f"http://{address}/metrics")).raise_for_status()
                await asyncio.sleep(SCRAPE_S)


def cpu_s(pid: int) -> float:
    """Of all threads of a process, user and system."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


@asynccontextmanager
async def running(settings: Sequence[str], *, is_on: bool) -> AsyncIterator[Running]:
    """A router, a gateway and one worker that decodes, on free ports."""
    own = ("gateway.listen=127.0.0.1:0", "router.listen=127.0.0.1:0", "models.0.pools={unified: {}}")
    config = resolve_ports(load_config(overrides=[*own, "telemetry.log_level=warning", *settings]))
    async with ProcessLauncher() as launcher:
        names = set(await Cluster(config, launcher).start())
        async for event in launcher.events():
            if event.state is ComponentState.FAILED:
                raise LaunchError(f"{event.component}: {event.message}")
            if event.state is ComponentState.READY:
                names.discard(event.component)
                if not names:
                    break
        async with asyncio.timeout(config.launcher.start_timeout_s), RouterClient(config.router.listen) as router:
            async with httpx.AsyncClient(trust_env=False) as client:
                while (await client.get(f"http://{config.gateway.listen}/ready")).is_error:
                    await asyncio.sleep(READY_POLL_S)
            while not (status := await router.status()).gateways:
                await asyncio.sleep(READY_POLL_S)
        yield Running(config, status, is_on=is_on)


async def measure(options: argparse.Namespace) -> tuple[list[Turn], int]:
    workload = Workload(
        num_requests=options.streams, concurrency=options.streams, prompt_words=20, max_tokens=options.tokens
    )
    collector = Collector()
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    turns = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        off = await stack.enter_async_context(running(options.set, is_on=False))
        seen = [f"telemetry.otlp_endpoint=http://127.0.0.1:{port}", "telemetry.otlp_protocol=http", *options.set]
        on = await stack.enter_async_context(running(seen, is_on=True))
        for one in (off, on):
            await one.turn(workload)  # warm up
        for _ in range(options.blocks):
            turns += [await one.turn(workload) for one in (off, on, on, off)]
    return turns, collector.num_bytes


def difference(values: Sequence[float]) -> tuple[float, float]:
    """Of turns off, on, on, off, ...: the mean that on costs more, and the upper bound of it."""
    blocks = [values[start : start + 4] for start in range(0, len(values), 4)]
    made = [(b + c) / 2 - (a + d) / 2 for a, b, c, d in blocks]
    mean = statistics.fmean(made)
    if len(made) < 2:
        return mean, math.inf
    t = _T95[min(len(made) - 1, len(_T95)) - 1]
    return mean, mean + t * statistics.stdev(made) / math.sqrt(len(made))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.telemetry", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--blocks", type=int, default=6, help="of four turns each, two at least")
    parser.add_argument("--quick", action="store_true", help="fewer blocks, shorter answers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of both clusters")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.tokens = 3, 48
    try:
        turns, num_bytes = asyncio.run(measure(options))
    except (ServingError, httpx.HTTPError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    without = statistics.fmean(turn.decode_us for turn in turns if not turn.is_on)
    decode, decode_bound = (value / without for value in difference([turn.decode_us for turn in turns]))
    gateway, gateway_bound = difference([turn.gateway_us for turn in turns])
    gateway_off = statistics.fmean(turn.gateway_us for turn in turns if not turn.is_on)
    print(f"{len(turns)} turns of {options.streams} streams; {num_bytes} bytes of spans came")
    print(f"without: decode worker {without:.1f} us a token, gateway {gateway_off:.1f} us a token")
    holds = [decode_bound <= MAX_DECODE_SHARE, gateway_bound <= MAX_GATEWAY_US]
    bars = (
        (f"decode worker's CPU  {100 * decode:+6.2f} %, at most {100 * decode_bound:.2f} %", MAX_DECODE_SHARE * 100),
        (f"gateway's CPU        {gateway:+6.2f} us a token, at most {gateway_bound:.2f} us", MAX_GATEWAY_US),
    )
    for (line, bar), is_good in zip(bars, holds, strict=True):
        print(f"{line:60} bar <= {bar:g}  {'holds' if is_good else 'MISSED'}")
    if options.json is not None:
        figures = {
            "turns": [asdict(turn) for turn in turns],
            "num_bytes": num_bytes,
            "decode_share": decode,
            "decode_share_bound": decode_bound,
            "gateway_us": gateway,
            "gateway_us_bound": gateway_bound,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
