"""How fast the ``tcp`` backend moves KV between two processes, beside a raw socket copy of as many bytes:
``python -m bench.tcp_link``.

This process reads (D), a child holds (P) and also feeds a plain socket with ``sendall``, which this process empties
with ``recv_into``. Rounds of both alternate, so that a noisy neighbour meets both. Exits 1 below the bar.
"""

import argparse
import dataclasses
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.end import End
from core.config import set_worker_environment
from core.handoff import PeerInfo
from kvtransfer.backends.base import Batch, Link, OpState
from kvtransfer.memory import REGION_KV
from kvtransfer.plan import Blocks, plan_blocks
from rpc.convert import from_pb, to_pb
from rpc.pb import handoff_pb2

BAR = 0.6
"""Of the raw copy's rate, best round to best round."""
_IDLE_S = 50e-6
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    num_blocks: int
    num_bytes: int
    tcp_gbps: float
    tcp_median_gbps: float
    raw_gbps: float
    raw_median_gbps: float
    ratio: float
    """Best to best."""
    bar: float = BAR


def hold(num_blocks: int) -> None:
    """The child: serves its memory, and sends it once for each byte that comes over the plain socket."""
    end = End("tcp", "P", num_blocks)
    end.kv.data[:] = 1
    listener = socket.create_server(("127.0.0.1", 0))
    fields = {"peer": to_pb(end.peer).SerializeToString().hex(), "raw": listener.getsockname()[1]}
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
    sock, _ = listener.accept()

    def feed() -> None:
        while command := sock.recv(8):
            sock.sendall(end.kv.data.data[: int.from_bytes(command, "little")])

    feeder = threading.Thread(target=feed, name="feed")
    feeder.start()
    sys.stdin.read()
    feeder.join()
    end.backend.close()


def measure(num_blocks: int, rounds: int) -> Report:
    """Run the child and all rounds. The blocks are half of a pool, scattered anew in each round."""
    pool_blocks = 2 * num_blocks
    command = [sys.executable, "-m", "bench.tcp_link", "--hold", "--blocks", str(pool_blocks)]
    end = End("tcp", "D", pool_blocks)
    num_bytes = num_blocks * end.geometry.block_bytes
    tcp_s: list[float] = []
    raw_s: list[float] = []
    rng = random.Random(0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        fields = json.loads(child.stdout.readline())
        peer = from_pb(PeerInfo, handoff_pb2.PeerInfo.FromString(bytes.fromhex(fields["peer"])))
        link = end.backend.connect(peer)
        with socket.create_connection(("127.0.0.1", fields["raw"])) as sock:
            for _ in range(rounds):
                remote, local = (rng.sample(range(pool_blocks), num_blocks) for _ in range(2))
                tcp_s.append(_fetch(end, link, remote, local))
                raw_s.append(_receive(sock, end.kv.data.data[:num_bytes]))
        child.stdin.close()
    end.backend.close()
    return Report(
        num_blocks=num_blocks,
        num_bytes=num_bytes,
        tcp_gbps=num_bytes / min(tcp_s) / 1e9,
        tcp_median_gbps=num_bytes / statistics.median(tcp_s) / 1e9,
        raw_gbps=num_bytes / min(raw_s) / 1e9,
        raw_median_gbps=num_bytes / statistics.median(raw_s) / 1e9,
        ratio=min(raw_s) / min(tcp_s),
    )


def _fetch(end: End, link: Link, remote: list[int], local: list[int]) -> float:
    """Seconds from the first post until the last operation is done, two chunks in flight as in a session."""
    began = time.perf_counter()
    source, target = (Blocks(geometry=end.geometry, block_ids=ids) for ids in (remote, local))
    plan = plan_blocks(source, target, num_kv_heads=end.geometry.num_kv_heads)
    batches = [Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=chunk) for chunk in plan.chunks]
    in_flight = [end.backend.post(link, batch) for batch in batches[:2]]
    for batch in [*batches[2:], None, None]:
        while (status := end.backend.poll(in_flight[0])).state is OpState.PENDING:
            if time.perf_counter() - began > _LIMIT_S:
                raise SystemExit("a transfer did not end")
            time.sleep(_IDLE_S)
        if status.state is not OpState.DONE:
            raise SystemExit(f"a transfer failed: {status.detail}")
        del in_flight[0]
        if batch is not None:
            in_flight.append(end.backend.post(link, batch))
        if not in_flight:
            break
    return time.perf_counter() - began


def _receive(sock: socket.socket, target: memoryview) -> float:
    """Seconds from the request until all of ``target`` was received."""
    began = time.perf_counter()
    sock.sendall(len(target).to_bytes(8, "little"))
    while target:
        target = target[sock.recv_into(target) :]
    return time.perf_counter() - began


def render(report: Report) -> str:
    return "\n".join(
        (
            f"tcp, {report.num_blocks} scattered blocks, {report.num_bytes / 1e6:.0f} MB",
            f"  tcp backend {report.tcp_gbps:6.2f} GB/s best, median {report.tcp_median_gbps:.2f}",
            f"  raw socket  {report.raw_gbps:6.2f} GB/s best, median {report.raw_median_gbps:.2f}",
            f"  ratio       {report.ratio:6.2f} of the raw copy (bar {report.bar})",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The tcp backend beside a raw socket copy of as many bytes.")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--json", type=Path, default=None, help="write the report there")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_worker_environment(1)
    if options.hold:
        hold(options.blocks)
        return
    report = measure(options.blocks, 15 if options.quick else options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(dataclasses.asdict(report)) + "\n")
    print(render(report))
    if report.ratio < report.bar:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
