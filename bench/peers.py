"""What a serving path adds to a worker that computes nothing, ours beside the routers of others:
``python -m bench.peers``.

``--streams`` clients read 20 tokens a second each. In the first half of that CPU time of the path's process is counted,
for each token that passes; in the second half single requests ask in turns the worker itself and through the path, and
added TTFT is what the second takes more. In turns A B B A, so that a noisy neighbour meets all.

Ours is the gateway (template, tokenizer, checks, detokenizer) before a scripted worker over gRPC; ``vllm-router`` and
``sglang-router`` (PyPI, Rust) pass HTTP on to a worker that speaks it, and look into nothing. They are no dependencies:
``--peers FOLDER`` names the ``bin`` of an environment that has them. Who is absent is said.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.bars import Ratio, as_json, show
from bench.client.endpoint import Asking, Endpoint, Route, Said
from bench.client.http import HttpClient
from bench.client.record import Record
from bench.client.scripts import Line, Part, Script
from bench.gateway import MAX_ADDED_TTFT_MS, MAX_US_PER_TOKEN, Processes
from bench.gateway import MODEL as OUR_MODEL
from bench.open_ai_worker import MODEL

START_S = 60.0
_ROUTERS: dict[str, tuple[str, ...]] = {
    "vllm-router": ("--policy", "round_robin", "--log-level", "error"),
    "sglang-router": ("launch", "--policy", "round_robin", "--log-level", "error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Something between client and worker."""

    name: str
    url: str
    model: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    name: str
    added_p50_ms: float
    added_p99_ms: float
    us_per_token: float


@contextmanager
def worker() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "bench.open_ai_worker"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def router(program: Path, worker_url: str) -> Iterator[Way]:
    port, other = _free_port(), _free_port()
    command = [str(program), *_ROUTERS[program.name], "--worker-urls", worker_url, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(other)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Way(name=program.name, url=f"http://127.0.0.1:{port}", model=MODEL, pid=process.pid)
    finally:
        process.terminate()
        process.wait(20)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpu_s(pid: int) -> float:
    """Of all threads of a process, user and system."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def _script(number: int, max_tokens: int) -> Script:
    return Script(lines=(Line(parts=(Part(key=str(number), num_tokens=40),), max_tokens=max_tokens),))


class Prober:
    def __init__(self, path: Way) -> None:
        self._client = HttpClient(path.url)
        # Sampled requests are what the scripted worker streams; the peers' worker streams all.
        extra = {"temperature": 1.0, "seed": 1}
        self._endpoint = Endpoint(
            self._client, Asking(model=path.model, route=Route.CHAT, is_exact=False, extra=extra, timeout_s=120)
        )
        self._number = 0

    async def ask(self, max_tokens: int) -> Record:
        """Raises RuntimeError when it fails."""
        self._number += 1
        script = _script(self._number, max_tokens)
        record = await self._endpoint.ask(script, 0, self._endpoint.body(script, 0, Said()), due_at=0.0)
        if not record.is_ok:
            raise RuntimeError(f"a request failed: {record.error}")
        return record

    async def ready(self) -> None:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await self.ask(1)
                    return
                except RuntimeError:
                    await asyncio.sleep(0.2)

    def close(self) -> None:
        self._client.close()


async def measure(path: Way, direct: Way, *, streams: int, seconds: float) -> Seen:
    through, straight = Prober(path), Prober(direct)
    try:
        await through.ready()
        await straight.ready()
        reading = [asyncio.create_task(through.ask(int(20 * (2 * seconds + 1)))) for _ in range(streams)]
        await asyncio.sleep(1.0)  # all of them run
        began, cpu = time.perf_counter(), cpu_s(path.pid)
        await asyncio.sleep(seconds)
        ended, spent = time.perf_counter(), cpu_s(path.pid) - cpu
        added = []
        while time.perf_counter() - ended < seconds:
            there, alone = await through.ask(1), await straight.ask(1)
            added.append(1e3 * (there.ttft_s - alone.ttft_s))
            await asyncio.sleep(0.02)
        times = [at for record in await asyncio.gather(*reading) for at in record.times]
        tokens = sum(began <= at < ended for at in times)
    finally:
        through.close()
        straight.close()
    p50, p99 = np.percentile(added, [50, 99])
    return Seen(name=path.name, added_p50_ms=float(p50), added_p99_ms=float(p99), us_per_token=1e6 * spent / tokens)


def mean(several: Sequence[Seen]) -> Seen:
    fields = ("added_p50_ms", "added_p99_ms", "us_per_token")
    return Seen(name=several[0].name, **{f: statistics.median(getattr(one, f) for one in several) for f in fields})


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.peers", description=__doc__)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where vllm-router and sglang-router are")
    parser.add_argument("--streams", type=int, default=32, metavar="N")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each half of a turn")
    parser.add_argument("--quick", action="store_true", help="3 s each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds = 3.0 if options.quick else options.seconds
    seen: dict[str, list[Seen]] = {}
    with ExitStack() as stack:
        url = stack.enter_context(worker())
        direct = Way(name="the worker itself", url=url, model=MODEL, pid=0)
        processes = stack.enter_context(Processes())
        ours = f"http://{processes.host}:{processes.port}"
        paths = [Way(name="baton gateway", url=ours, model=OUR_MODEL, pid=processes.gateway_pid)]
        for name in _ROUTERS:
            program = None if options.peers is None else options.peers / name
            if program is None or not program.exists():
                print(f"{name} is not installed: not beside it")
                continue
            paths.append(stack.enter_context(router(program, url)))
        for path in (*paths, *reversed(paths)):
            found = asyncio.run(measure(path, direct, streams=options.streams, seconds=seconds))
            seen.setdefault(path.name, []).append(found)
    rows = [mean(several) for several in seen.values()]
    print("path               added TTFT p50     p99    CPU/token")
    for row in rows:
        print(f"{row.name:16} {row.added_p50_ms:12.2f} ms {row.added_p99_ms:6.2f} ms {row.us_per_token:8.1f} us")
    found_ratios = ratios(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": as_json(found_ratios)}, indent=2) + "\n")
    return show(found_ratios)


def ratios(rows: Sequence[Seen]) -> list[Ratio]:
    """Ours against its bars. What the peers take is printed, and no bar: they do less."""
    own = rows[0]
    figures = (
        ("added TTFT p50, ms", own.added_p50_ms, MAX_ADDED_TTFT_MS),
        ("CPU for a token, us", own.us_per_token, MAX_US_PER_TOKEN),
    )
    return [Ratio(name=name, best=value, median=value, bar=bar, is_at_most=True) for name, value, bar in figures]


if __name__ == "__main__":
    sys.exit(main())
