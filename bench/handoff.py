"""How fast KV moves between two processes, beside a memcpy of as many bytes: ``python -m bench.handoff``.

This process reads (D), a child holds (P). Each round moves ``--blocks`` scattered blocks of the default model's layout
through the transfer thread, copies as many with numpy, and makes their digests, interleaved, so that a noisy neighbour
meets all three. Ratios are what to look at; absolute numbers are the machine's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from core.clock import MonotonicClock
from core.config import set_worker_environment
from core.handoff import DigestKind, HandoffOutcome, LeaseRef, PeerInfo
from core.ids import HandoffId, LeaseId, WorkerId, new_incarnation
from core.kv import KVFormat, KVGeometry
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Identity, Link
from kvtransfer.custody import Custody
from kvtransfer.digest import Digester
from kvtransfer.fetch import FetchRequest, FetchResult
from kvtransfer.layout import Region, kv_region
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import REGION_KV, AlignedBuffer, Scratch
from kvtransfer.slot import SlotMemory
from kvtransfer.transfer_thread import TransferThread
from rpc.convert import from_pb, to_pb
from rpc.pb import handoff_pb2

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE_BYTES = 30, 3, 64, 16, 4
"""The default model in float32."""
LIMIT_S = 30.0


class NoPool:
    """Custody without a block pool: nothing else uses these blocks."""

    def take_custody(self, blocks: object) -> None: ...

    def end_custody(self, blocks: object) -> None: ...


class End:
    """One process's memory behind a backend."""

    def __init__(self, backend: str, worker_id: str, num_blocks: int) -> None:
        self.geometry = KVGeometry(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype_bytes=DTYPE_BYTES,
        )
        self.kv = AlignedBuffer(num_blocks * self.geometry.block_bytes)
        self.slots = SlotMemory(16)
        self.scratch = Scratch(16)
        self.backend: Backend = create_backend(backend)
        identity = Identity(worker_id=WorkerId(worker_id), incarnation=new_incarnation())
        regions = (
            kv_region(self.kv.region(REGION_KV), self.geometry),
            Region(memory=self.slots.region()),
            Region(memory=self.scratch.region()),
        )
        self.peer = PeerInfo(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            format=KVFormat(
                model_digest="bench",
                tokenizer_digest="",
                template_digest="",
                compute_dtype="float32",
                kv_dtype="float32",
                quantisation="none",
                num_layers=NUM_LAYERS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
            ),
            geometry=self.geometry,
            link=self.backend.open(identity, regions),
        )


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
    digester = Digester(DigestKind.WSUM64, end.geometry, end.kv.data)
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
    parser = argparse.ArgumentParser(description="KV transfer between two processes, beside a memcpy in the same run.")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_worker_environment(1)
    if options.hold:
        hold(options.backend, options.blocks)
    else:
        print(render(measure(options.backend, options.blocks, options.rounds)))


if __name__ == "__main__":
    main()
