"""What the gateway costs: ``python -m bench.gateway``. Real sockets, a worker that computes nothing.

Three processes: a scripted worker that is also the router, one gateway, and this client.

- ``streamed token``: CPU time of the gateway for each token while ``--streams`` clients read 20 tokens a second each.
  It counts only when (nearly) every token is an event of its own.
- ``plain request``: CPU time of the gateway for each plain chat of 16 tokens, on 4 connections.
- ``added TTFT``: time to the first token through the gateway less that of a direct call of the worker, while half of
  the streams are read. Calls alternate, so that a noisy neighbour meets both.

CPU time is the scheduler's own account of all threads: it does not depend much on who else runs. Medians over rounds,
with their spread. Each has its floor, measured in the same run: the same frames sent to the same clients by a process
that does nothing else, and for a plain request the HTTP server's answer to ``GET /health``, template and tokenizer, and
the calls of router and worker, each alone. Exit status 1 when a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import orjson
import uvloop

from bench.gateway_floors import TOKENS_PER_S, calls_us, tokenize_us
from core import types as t
from core.config import load_config
from core.ids import GatewayId, RequestId, new_incarnation
from modelfiles import open_model
from rpc.clients import DecodeClient, RouterClient

MAX_US_PER_TOKEN = 12.0
MIN_EVENTS_PER_TOKEN = 0.95
MAX_US_PER_REQUEST = 200.0
MAX_ADDED_TTFT_MS = 3.0

TEXT = "The river runs past the mill and the old bridge, and in winter the garden behind it sleeps under snow.\n"
PROMPT = "Tell me about the river, the mill and the bridge, in a few sentences, as if I had never seen them."
MODEL = "smollm2-135m-instruct"


class Processes:
    """The worker and the gateway, from start to stop."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Processes":
        config = load_config(environ={})
        token_ids = open_model(config.models[0].path).tokenizer().encode(TEXT, parse_special=False)
        ids = ",".join(map(str, token_ids))
        worker = self.start("bench.scripted_worker", "--tokens-per-s", str(TOKENS_PER_S), "--token-ids", ids)
        self.worker_address = self.line(worker)
        settings = (f"router.listen={self.worker_address}", "gateway.listen=127.0.0.1:0", "telemetry.log_level=warning")
        gateway = self.start("bench.gateway", "--serve", *settings)
        self.gateway_pid = gateway.pid
        self.host, _, port = self.line(gateway).rpartition(":")
        self.port = int(port)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(self, module: str, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
        self._stack.callback(process.wait, 20)
        self._stack.callback(process.terminate)
        return process

    @staticmethod
    def line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit("a process of the bench did not start")
        return line

    def cpu_s(self, pid: int = 0) -> float:
        """CPU time of the gateway (or another process), all of its threads, user and system."""
        tasks = Path(f"/proc/{pid or self.gateway_pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


# -- the client -------------------------------------------------------------------------------------------------------


def _request(body: dict[str, object]) -> bytes:
    content = orjson.dumps(body)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _chat(prompt: str = PROMPT, **more: object) -> bytes:
    return _request({"model": MODEL, "messages": [{"role": "user", "content": prompt}], **more})


class _Stream(asyncio.Protocol):
    """Reads events and counts those that bring text."""

    def __init__(self) -> None:
        self.num_events = 0
        self.first_at = 0.0
        self.first = asyncio.get_running_loop().create_future()
        self.done = asyncio.get_running_loop().create_future()
        self.problem = b""

    def data_received(self, data: bytes) -> None:
        num_events = data.count(b'"delta":{"content":"')
        if num_events and not self.num_events:
            self.first_at = time.perf_counter()
            self.first.set_result(None)
        self.num_events += num_events
        if b'"error"' in data or (not self.num_events and b" 200 OK" not in data[:20] and data[:5] == b"HTTP/"):
            self.problem = data
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_exception(ConnectionError(f"the gateway closed: {self.problem[:300]!r}"))
                future.exception()


@contextlib.asynccontextmanager
async def _streams(host: str, port: int, number: int, seconds: float) -> AsyncIterator[list[_Stream]]:
    """Streams under way, all past their first token."""
    loop = asyncio.get_running_loop()
    body = _chat(stream=True, temperature=1, max_tokens=int((seconds + 30) * TOKENS_PER_S))
    connections = [await loop.create_connection(_Stream, host, port) for _ in range(number)]
    try:
        for transport, _ in connections:
            transport.write(body)
            await asyncio.sleep(0.001)
        await asyncio.gather(*[stream.first for _, stream in connections])
        yield [stream for _, stream in connections]
    finally:
        for transport, _ in connections:
            transport.abort()
        await asyncio.sleep(0.3)  # until the gateway has noticed


async def measure_tokens(processes: Processes, streams: int, rounds: int, round_s: float) -> tuple[list[float], float]:
    """(CPU microseconds for each token, by round; events for each token)."""
    costs, num_events, num_tokens = [], 0, 0.0
    async with _streams(processes.host, processes.port, streams, rounds * round_s + 5) as running:
        await asyncio.sleep(0.5)
        for _ in range(rounds):
            started, events = time.perf_counter(), sum(stream.num_events for stream in running)
            cpu_s = processes.cpu_s()
            await asyncio.sleep(round_s)
            cpu_s = processes.cpu_s() - cpu_s
            tokens = streams * TOKENS_PER_S * (time.perf_counter() - started)
            num_tokens += tokens
            num_events += sum(stream.num_events for stream in running) - events
            costs.append(1e6 * cpu_s / tokens)
    return costs, num_events / num_tokens


async def measure_sends(processes: Processes, streams: int, rounds: int, round_s: float) -> list[float]:
    """CPU microseconds for each frame of a process that does nothing but send, by round: the floor of a token."""
    sender = processes.start("bench.gateway_floors", str(streams))
    costs = []
    async with _streams("127.0.0.1", int(processes.line(sender)), streams, rounds * round_s) as running:
        for _ in range(rounds):
            events, cpu_s = sum(stream.num_events for stream in running), processes.cpu_s(sender.pid)
            await asyncio.sleep(round_s)
            cpu_s = processes.cpu_s(sender.pid) - cpu_s
            costs.append(1e6 * cpu_s / (sum(stream.num_events for stream in running) - events))
    return costs


async def measure_plain(processes: Processes, rounds: int, requests: int, body: bytes = b"") -> list[float]:
    """CPU microseconds for each plain request (or another one), by round. No two chats say the same."""
    numbers = count(1)

    async def one_client() -> None:
        reader, writer = await asyncio.open_connection(processes.host, processes.port)
        for _ in range(requests // 4):
            writer.write(body or _chat(f"{PROMPT} {next(numbers)}", temperature=0, max_tokens=16))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()

    costs = []
    for _ in range(rounds):
        cpu_s = processes.cpu_s()
        await asyncio.gather(*[one_client() for _ in range(4)])
        costs.append(1e6 * (processes.cpu_s() - cpu_s) / (requests // 4 * 4))
    return costs


async def measure_parts(processes: Processes, rounds: int) -> dict[str, float]:
    """The floor of a plain request, in parts of CPU microseconds."""
    health = await measure_plain(processes, rounds, 200, b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n")
    parts = {"http_us": min(health), "tokenize_us": tokenize_us([f"{PROMPT} {number}" for number in range(100)])}
    async with _direct(processes.worker_address) as call:
        return parts | {"calls_us": await calls_us(call, 200)}


async def measure_ttft(processes: Processes, streams: int, calls: int) -> tuple[list[float], list[float]]:
    """(milliseconds to the first token through the gateway, of a direct call)."""
    through, direct = [], []
    loop = asyncio.get_running_loop()
    async with _direct(processes.worker_address) as call, _streams(processes.host, processes.port, streams, 60):
        for _ in range(calls):
            started = time.perf_counter()
            transport, stream = await loop.create_connection(_Stream, processes.host, processes.port)
            transport.write(_chat(stream=True, max_tokens=2, temperature=1))
            await stream.first
            through.append(1e3 * (stream.first_at - started))
            transport.abort()
            direct.append(1e3 * await call())
            await asyncio.sleep(0.013)  # no multiple of the steps
    return through, direct


@contextlib.asynccontextmanager
async def _direct(address: str) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """A call that asks the router and the worker as a gateway would, and returns the seconds to the first token."""
    gateway_id, incarnation = GatewayId("direct"), new_incarnation()
    router = RouterClient(address)
    template = t.GenerateRequest(
        request_id=RequestId("direct"),
        model=MODEL,
        prompt_token_ids=tuple(range(100, 160)),
        sampling=t.SamplingParams(max_tokens=1),
        gateway_id=gateway_id,
        gateway_incarnation=incarnation,
        deadline_s=30,
    )
    place = t.PlaceRequest(
        request_id=template.request_id,
        model=MODEL,
        attempt=1,
        num_prompt_tokens=template.num_prompt_tokens,
        max_new_tokens=1,
        gateway_id=gateway_id,
        gateway_incarnation=incarnation,
        deadline_s=30,
    )
    placement = await router.place(place)
    client = DecodeClient(placement.decode)
    outputs = client.outputs(gateway_id, incarnation)
    await anext(outputs)

    async def call() -> float:
        started = time.perf_counter()
        placement = await router.place(place)
        await client.admit(
            t.AdmitRequest(
                request=template,
                handoff_id=placement.handoff_id,
                mode=placement.mode,
                worker_incarnation=placement.decode.incarnation,
            )
        )
        await anext(outputs)
        return time.perf_counter() - started

    yield call
    await outputs.aclose()  # type: ignore[attr-defined]
    await client.close()
    await router.close()


# -- the report -------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.1f}   ({min(values):.1f} to {max(values):.1f})"


def _bars(result: dict[str, float]) -> Iterator[tuple[str, bool]]:
    of_send = result["us_per_token"] / result["us_per_send"]
    parts = result["http_us"] + result["tokenize_us"] + result["calls_us"]
    yield (
        f"streamed token  {result['us_per_token']:6.1f} us, at most {MAX_US_PER_TOKEN:g}; {of_send:.2f} of the floor",
        result["us_per_token"] <= MAX_US_PER_TOKEN,
    )
    yield (
        f"events a token  {result['events_per_token']:6.3f}, at least {MIN_EVENTS_PER_TOKEN:g}",
        result["events_per_token"] >= MIN_EVENTS_PER_TOKEN,
    )
    yield (
        f"plain request   {result['us_per_request']:6.1f} us, at most {MAX_US_PER_REQUEST:g}; "
        f"{result['us_per_request'] / parts:.2f} of the floor ({parts:.0f} us)",
        result["us_per_request"] <= MAX_US_PER_REQUEST,
    )
    yield (
        f"added TTFT      {result['added_ttft_ms']:6.2f} ms (p50), at most {MAX_ADDED_TTFT_MS:g}",
        result["added_ttft_ms"] <= MAX_ADDED_TTFT_MS,
    )


async def measure(options: argparse.Namespace) -> dict[str, float]:
    rounds, round_s, requests, calls = (2, 3.0, 200, 30) if options.quick else (5, 6.0, 600, 150)
    with Processes() as processes:
        await measure_plain(processes, 1, 40)  # warm up
        per_token, events = await measure_tokens(processes, options.streams, rounds, round_s)
        sends = await measure_sends(processes, options.streams, rounds, round_s)
        per_request = await measure_plain(processes, rounds, requests)
        parts = await measure_parts(processes, rounds)
        through, direct = await measure_ttft(processes, options.streams // 2, calls)
    print(f"CPU us a streamed token, {options.streams} streams   {_spread(per_token)}")
    print(f"CPU us a bare send of the same       {_spread(sends)}")
    print(f"CPU us a plain request               {_spread(per_request)}")
    print(
        "  its parts alone                    " + ", ".join(f"{name[:-3]} {cost:.0f}" for name, cost in parts.items())
    )
    print(f"TTFT through the gateway, ms         {_spread(through)}")
    print(f"TTFT of a direct call, ms            {_spread(direct)}")
    return {
        "us_per_token": statistics.median(per_token),
        "events_per_token": events,
        "us_per_send": statistics.median(sends),
        "us_per_request": statistics.median(per_request),
        **parts,
        "added_ttft_ms": statistics.median(through) - statistics.median(direct),
    }


def _serve(settings: list[str]) -> None:
    """The gateway's process: it tells its address on standard output."""
    from gateway import service

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        config = load_config(overrides=settings, environ={})
        service.run(config, on_listening=lambda addresses: print(addresses["http"], flush=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--serve", nargs="+", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
        return 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(options))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    missed = False
    for line, holds in _bars(result):
        missed |= not holds
        print(f"{'ok    ' if holds else 'MISSED'} {line}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
