"""The hand-off against its floors: ``python -m bench.handoff``.

Three parts, each in two processes: blocks through the transfer thread beside a memcpy of as many (here), the ``tcp``
backend beside a raw socket (:mod:`bench.tcp_link`), and the whole hand-over of a long prompt between two workers
(:mod:`bench.hand_over`). In the first, this process reads (D), a child holds (P). Each round moves ``--blocks``
scattered blocks of the default model's layout, copies as many with numpy, and makes their digests, interleaved, so that
a noisy neighbour meets all three. Ratios are what to look at; absolute numbers are the machine's.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import hand_over, tcp_link
from bench.end import End, NoPool
from bench.two_workers import Setup
from core.clock import MonotonicClock
from core.config import set_worker_environment
from core.handoff import DigestKind, HandoffOutcome, LeaseRef, PeerInfo
from core.ids import HandoffId, LeaseId
from engine.kernels.digest import compiled_wsum64
from kvtransfer.backends.base import Link
from kvtransfer.custody import Custody
from kvtransfer.digest import Digester
from kvtransfer.fetch import FetchRequest, FetchResult
from kvtransfer.lease import LeaseTable
from kvtransfer.transfer_thread import TransferThread
from rpc.convert import from_pb, to_pb
from rpc.pb import handoff_pb2

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Seconds unless said otherwise; rates are those of the best round, in GB/s."""

    backend: str
    num_blocks: int
    block_bytes: int
    fetch_gbps: float
    fetch_median_s: float
    memcpy_gbps: float
    memcpy_median_s: float
    ratio: float
    """Fetch to memcpy, best to best."""
    digest_gbps: float
    one_block_best_s: float
    one_block_median_s: float
    """A fetch of one block: mostly fixed cost."""
    queue_median_s: float
    slot_median_s: float
    connect_s: float


def hold(backend: str, num_blocks: int) -> None:
    """The child: says how it is reached and holds one lease until standard input closes."""
    end = End(backend, "P", num_blocks)
    end.kv.data[:] = np.random.default_rng(0).integers(0, 256, end.kv.data.nbytes, dtype=np.uint8)
    leases = LeaseTable(end.slots, block_bytes=end.geometry.block_bytes, lease_s=600.0, quota_bytes=end.kv.data.nbytes)
    lease = leases.open(HandoffId("bench"), num_blocks=num_blocks, deadline_s=600.0, now=0.0)
    leases.seal(lease.ref.lease_id, range(num_blocks), digest=0, now=0.0)
    fields = {
        "peer": to_pb(end.peer).SerializeToString().hex(),
        "lease_id": lease.ref.lease_id,
        "epoch": lease.ref.epoch,
        "slot": lease.slot,
    }
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    end.backend.close()


def measure(backend: str, num_blocks: int, rounds: int) -> Report:
    """Run the child and all rounds."""
    pool_blocks = 2 * num_blocks
    command = [sys.executable, "-m", "bench.handoff", "--hold", "--backend", backend, "--blocks", str(pool_blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        fields = json.loads(child.stdout.readline())
        peer = from_pb(PeerInfo, handoff_pb2.PeerInfo.FromString(bytes.fromhex(fields["peer"])))
        lease = LeaseRef(lease_id=LeaseId(fields["lease_id"]), epoch=fields["epoch"])
        end = End(backend, "D", pool_blocks)
        thread = TransferThread(
            end.backend,
            geometry=end.geometry,
            scratch=end.scratch,
            landing=end.canary.landing,
            custody=Custody(NoPool()),
            clock=MonotonicClock(),
            name="transfer",
        )
        thread.start()
        try:
            began = time.perf_counter()
            link = thread.connect(peer).result(LIMIT_S)
            connect_s = time.perf_counter() - began
            return _rounds(end, thread, link, lease, fields["slot"], num_blocks, rounds, connect_s)
        finally:
            thread.stop(LIMIT_S)
            child.stdin.close()


def _rounds(
    end: End,
    thread: TransferThread,
    link: Link,
    lease: LeaseRef,
    slot: int,
    num_blocks: int,
    rounds: int,
    connect_s: float,
) -> Report:
    rng = random.Random(0)
    pool_blocks = end.geometry.num_blocks
    copy_source = np.ones_like(end.kv.data).reshape(pool_blocks, -1)
    copy_target = np.ones_like(copy_source)
    digester = Digester(DigestKind.WSUM64, end.geometry, end.kv.data, sums=compiled_wsum64())
    fetches: list[FetchResult] = []
    singles: list[FetchResult] = []
    fetch_s: list[float] = []
    single_s: list[float] = []
    copy_s: list[float] = []
    digest_s: list[float] = []

    def fetch(remote: list[int], local: list[int], times: list[float], results: list[FetchResult]) -> None:
        request = FetchRequest(
            transfer_id=len(fetches) + len(singles),
            remote_blocks=tuple(remote),
            local_blocks=tuple(local),
            lease=lease,
            slot=slot,
            deadline_s=LIMIT_S,
        )
        began = time.perf_counter()
        transfer = thread.fetch(link, request)
        result = transfer.result.result(LIMIT_S)
        times.append(time.perf_counter() - began)
        transfer.quiet.result(LIMIT_S)
        if result.outcome is not HandoffOutcome.OK:
            raise SystemExit(f"the fetch ended with {result.outcome}: {result.detail}")
        results.append(result)

    for _ in range(rounds):
        remote = rng.sample(range(pool_blocks), num_blocks)
        local = rng.sample(range(pool_blocks), num_blocks)
        fetch(remote, local, fetch_s, fetches)
        began = time.perf_counter()
        for source, target in zip(remote, local, strict=True):
            copy_target[target] = copy_source[source]
        copy_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        digester.digest(local)
        digest_s.append(time.perf_counter() - began)
        fetch(remote[:1], local[:1], single_s, singles)
    num_bytes = num_blocks * end.geometry.block_bytes
    return Report(
        backend=end.backend.name,
        num_blocks=num_blocks,
        block_bytes=end.geometry.block_bytes,
        fetch_gbps=num_bytes / min(fetch_s) / 1e9,
        fetch_median_s=statistics.median(fetch_s),
        memcpy_gbps=num_bytes / min(copy_s) / 1e9,
        memcpy_median_s=statistics.median(copy_s),
        ratio=min(copy_s) / min(fetch_s),
        digest_gbps=num_bytes / min(digest_s) / 1e9,
        one_block_best_s=min(single_s),
        one_block_median_s=statistics.median(single_s),
        queue_median_s=statistics.median(result.times.queue_s for result in singles),
        slot_median_s=statistics.median(result.times.slot_s for result in singles),
        connect_s=connect_s,
    )


def render(report: Report) -> str:
    megabytes = report.num_blocks * report.block_bytes / 1e6
    return "\n".join(
        (
            f"{report.backend}, {report.num_blocks} scattered blocks of {report.block_bytes} bytes, {megabytes:.0f} MB",
            f"  fetch   {report.fetch_gbps:6.2f} GB/s best, median {report.fetch_median_s * 1e3:.2f} ms",
            f"  memcpy  {report.memcpy_gbps:6.2f} GB/s best, median {report.memcpy_median_s * 1e3:.2f} ms",
            f"  ratio   {report.ratio:6.2f} of memcpy",
            f"  digest  {report.digest_gbps:6.2f} GB/s (wsum64, one thread)",
            f"  one block {report.one_block_best_s * 1e6:.0f} us best, {report.one_block_median_s * 1e6:.0f} us median"
            f" (queue {report.queue_median_s * 1e6:.0f} us, slot read {report.slot_median_s * 1e6:.0f} us)",
            f"  first connect {report.connect_s * 1e3:.0f} ms",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.handoff", description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, default=None, help="write the reports there")
    parser.add_argument("--backend", default="nixl", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_worker_environment(1)
    if options.hold:
        hold(options.backend, options.blocks)
        return
    fetch = measure("nixl", options.blocks, options.rounds)
    print(render(fetch))
    tcp = tcp_link.measure(options.blocks, 15 if options.quick else 60)
    print(tcp_link.render(tcp))
    over = asyncio.run(hand_over.measure(Setup(), *((3, 1) if options.quick else (10, 3))))
    print(hand_over.render(over))
    if options.json is not None:
        reports = {"fetch": asdict(fetch), "tcp": asdict(tcp), "hand_over": asdict(over)}
        options.json.write_text(json.dumps(reports) + "\n")
    bars = (
        ("nixl, of an interleaved memcpy", fetch.ratio, ">=", 0.6),
        ("tcp, of a raw socket copy", tcp.ratio, ">=", tcp.bar),
        ("hand-over, of 1.5 x (memcpy of what was left) + 3 ms", over.best.exposed_s / over.bar_s, "<=", 1.0),
        ("digests, of the hand-over", over.digest_share, "<=", 0.15),
        (
            "throttled: exposed, of the ideal",
            over.throttled_exposed_s / over.throttled_ideal_s,
            "<=",
            1.15,
        ),
    )
    missed = False
    for name, ratio, relation, bar in bars:
        holds = ratio >= bar if relation == ">=" else ratio <= bar
        missed |= not holds
        print(f"{name}: {ratio:.2f} (bar {relation} {bar}{'' if holds else ', missed'})")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
