"""One suite for every transfer backend, also between processes, with peers that really die."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from core.errors import DigestMismatch, LayoutMismatch, PeerLost, StaleIncarnation
from core.handoff import Grant, HandoffOutcome
from core.ids import new_incarnation
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Batch, Link, Op, OpState, OpStatus
from kvtransfer.backends.inproc import Fabric
from kvtransfer.backends.paced import PacedBackend
from kvtransfer.fetch import FetchRequest, FetchResult
from kvtransfer.memory import REGION_KV, REGION_SCRATCH, REGION_SLOTS
from kvtransfer.plan import Blocks, Copy, plan_blocks
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.validate import check_read
from tests.support.transfer_peer import PeerProcess
from tests.support.transfer_side import GEOMETRY, Side

HEADS = GEOMETRY.num_kv_heads
LIMIT_S = 10.0


def finish(backend: Backend, op: Op, limit_s: float = LIMIT_S) -> OpStatus:
    """Poll to the end, as the transfer thread does."""
    until = time.monotonic() + limit_s
    while (status := backend.poll(op)).state is OpState.PENDING:
        assert time.monotonic() < until, "the operation did not end"
        time.sleep(0.0002)
    return status


def read_blocks(backend: Backend, link: Link, remote: list[int], local: list[int]) -> OpStatus:
    plan = plan_blocks(
        Blocks(geometry=GEOMETRY, block_ids=remote), Blocks(geometry=GEOMETRY, block_ids=local), num_kv_heads=HEADS
    )
    statuses = [
        finish(backend, backend.post(link, Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=chunk)))
        for chunk in plan.chunks
    ]
    return statuses[-1]


Pair = tuple[Side, Side, Link]


@pytest.fixture(params=["inproc", "inproc, paced", "nixl", "tcp", "dist"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Side]]:
    """Sides of one process over one backend, destroyed at the end."""
    fabric = Fabric()
    sides: list[Side] = []

    def side(worker_id: str) -> Side:
        name, _, is_paced = request.param.partition(", ")
        backend = create_backend(name, fabric=fabric)
        sides.append(Side(PacedBackend(backend, lambda num_bytes: 0.002) if is_paced else backend, worker_id))
        return sides[-1]

    yield side
    for made in reversed(sides):
        made.backend.close()


@pytest.fixture
def pair(make: Callable[[str], Side]) -> Pair:
    p, d = make("P"), make("D")
    p.fill(1)
    d.fill(2)
    return p, d, d.backend.connect(p.peer)


def test_scattered_blocks_arrive_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    p, d, link = pair
    before = d.blocks.copy()
    assert read_blocks(d.backend, link, [9, 3, 4, 31, 0], [1, 2, 3, 30, 31]).state is OpState.DONE
    before[[1, 2, 3, 30, 31]] = p.blocks[[9, 3, 4, 31, 0]]
    assert (d.blocks == before).all()


def test_nixl_tells_what_an_operation_cost(pair: Pair) -> None:
    _, d, link = pair
    batch = Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=(Copy(0, 0, 3 * GEOMETRY.block_bytes),))
    op = d.backend.post(link, batch)
    assert finish(d.backend, op).state is OpState.DONE
    assert (op.stats is not None) == (d.backend.name == "nixl")
    if op.stats is not None:
        assert 0 < op.stats.post_s + op.stats.move_s < LIMIT_S
        assert op.stats.num_descriptors == 1, "three blocks in a row are one"


def test_copies_that_are_no_whole_blocks_work_too(pair: Pair) -> None:
    p, d, link = pair
    copies = (Copy(5, 11, 100), Copy(GEOMETRY.block_bytes - 1, 3000, 77))
    batch = Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=copies)
    assert finish(d.backend, d.backend.post(link, batch)).state is OpState.DONE
    for remote, local, num_bytes in copies:
        assert (d.kv.data[local : local + num_bytes] == p.kv.data[remote : remote + num_bytes]).all()


def test_a_slot_is_read_into_a_scratch_cell(pair: Pair) -> None:
    p, d, link = pair
    _, grant = p.seal("h", [3])
    cell = d.scratch.allocate()
    assert cell is not None
    batch = Batch(
        remote_region=REGION_SLOTS, local_region=REGION_SCRATCH, copies=(Copy(grant.slot * 64, cell * 64, 64),)
    )
    assert finish(d.backend, d.backend.post(link, batch)).state is OpState.DONE
    assert d.scratch.read(cell) == p.slots.snapshot(grant.slot)


@pytest.mark.parametrize(
    "copy",
    [Copy(-64, 0, 64), Copy(0, -64, 64), Copy(0, 0, 0), Copy(2**40, 0, 64), Copy(0, 2**40, 64), Copy(0, 0, 2**40)],
)
def test_addresses_outside_the_advertised_regions_are_refused_and_nothing_is_posted(pair: Pair, copy: Copy) -> None:
    _, d, link = pair
    with pytest.raises(LayoutMismatch):
        d.backend.post(link, Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=(copy,)))
    with pytest.raises(LayoutMismatch):
        d.backend.post(link, Batch(remote_region="secrets", local_region=REGION_KV, copies=(Copy(0, 0, 64),)))
    assert link.num_pending == 0


def test_polling_a_finished_operation_changes_nothing(pair: Pair) -> None:
    _, d, link = pair
    op = d.backend.post(link, Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=(Copy(0, 0, 64),)))
    finish(d.backend, op)
    assert [d.backend.poll(op).state for _ in range(3)] == [OpState.DONE] * 3
    assert link.num_pending == 0


def test_connecting_is_idempotent_and_disconnecting_too(pair: Pair) -> None:
    p, d, link = pair
    assert d.backend.connect(p.peer) is link
    d.backend.disconnect(link)
    d.backend.disconnect(link)
    again = d.backend.connect(p.peer)
    assert read_blocks(d.backend, again, [3], [4]).state is OpState.DONE
    assert (d.blocks[4] == p.blocks[3]).all()


def test_a_link_with_pending_operations_is_not_disconnected(pair: Pair) -> None:
    _, d, link = pair
    link.num_pending += 1
    with pytest.raises(RuntimeError, match="pending"):
        d.backend.disconnect(link)
    link.num_pending -= 1


def test_metadata_of_another_backend_or_of_nobody_is_refused(pair: Pair) -> None:
    p, d, _ = pair
    other = replace(p.peer, link=replace(p.peer.link, backend="pigeon"))
    with pytest.raises(LayoutMismatch, match="pigeon"):
        d.backend.connect(other)


def test_a_second_start_of_a_worker_is_another_peer(make: Callable[[str], Side]) -> None:
    first, d = make("P"), make("D")
    first.fill(1)
    read_blocks(d.backend, d.backend.connect(first.peer), [3], [4])
    second = make("P")
    second.fill(5)
    link = d.backend.connect(second.peer)
    assert read_blocks(d.backend, link, [3], [4]).state is OpState.DONE
    assert (d.blocks[4] == second.blocks[3]).all()


def test_backends_come_and_go(make: Callable[[str], Side]) -> None:
    d = make("D")
    for number in range(3):
        p = make(f"P{number}")
        p.fill(number)
        link = d.backend.connect(p.peer)
        assert read_blocks(d.backend, link, [1], [2]).state is OpState.DONE
        assert (d.blocks[2] == p.blocks[1]).all()
        d.backend.disconnect(link)
        assert p.backend.close() and p.backend.close()


# -- between processes ------------------------------------------------------------------------------------------------


class Reader:
    """D in this process, with its transfer thread, and the P processes it reads from."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.side = Side(create_backend(backend), "D")
        self.thread: TransferThread = self.side.thread(stall_s=5.0)
        self.thread.start()
        self.processes: list[PeerProcess] = []
        self.next_id = 0

    def start(self, worker_id: str = "P", *, seed: int = 1) -> PeerProcess:
        self.processes.append(PeerProcess(worker_id, seed=seed, backend=self.backend))
        return self.processes[-1]

    def connect(self, process: PeerProcess) -> Link:
        return self.thread.connect(process.peer).result(LIMIT_S)

    def fetch(self, link: Link, grant: Grant, local: tuple[int, ...]) -> FetchResult:
        self.next_id += 1
        request = FetchRequest(
            transfer_id=self.next_id,
            remote_blocks=grant.block_ids,
            local_blocks=local,
            lease=grant.lease,
            slot=grant.slot,
            deadline_s=LIMIT_S,
        )
        transfer = self.thread.fetch(link, request)
        result = transfer.result.result(LIMIT_S)
        transfer.quiet.result(LIMIT_S)
        return result

    def close(self) -> None:
        clean = self.thread.stop(5.0)
        for process in self.processes:
            process.close()
        assert clean


@pytest.fixture(params=["nixl", "tcp"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(request.param)
    yield made
    made.close()


def content(seed: int) -> np.ndarray:
    """What a process started with this seed holds: [block, bytes]."""
    size = GEOMETRY.num_blocks * GEOMETRY.block_bytes
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return data.reshape(GEOMETRY.num_blocks, GEOMETRY.block_bytes)


def test_blocks_of_another_process_arrive_and_validate(reader: Reader) -> None:
    process = reader.start(seed=4)
    grant = process.seal("h", [3, 4, 5, 20, 1])
    link = reader.connect(process)
    local = (8, 9, 10, 2, 3)
    result = reader.fetch(link, grant, local)
    assert result.outcome is HandoffOutcome.OK, result
    assert result.num_copies == 3, "neighbours are merged"
    check_read(grant, result.snapshot, reader.side.digester().digest(local), num_kv_heads=HEADS)
    assert (reader.side.blocks[list(local)] == content(4)[[3, 4, 5, 20, 1]]).all()
    assert reader.thread.stats().bytes_received[0][1] == 5 * GEOMETRY.block_bytes


def test_a_corrupt_byte_is_caught_by_the_digests(reader: Reader) -> None:
    process = reader.start()
    grant = process.seal("h", [3, 4])
    process.flip(4, GEOMETRY.head_bytes + 9)
    result = reader.fetch(reader.connect(process), grant, (0, 1))
    assert result.outcome is HandoffOutcome.OK
    with pytest.raises(DigestMismatch, match="block 1 of the hand-off, kv head 1"):
        check_read(grant, result.snapshot, reader.side.digester().digest([0, 1]), num_kv_heads=HEADS)


def test_an_ended_lease_is_caught_by_the_slot(reader: Reader) -> None:
    process = reader.start()
    grant = process.seal("h", [3])
    link = reader.connect(process)
    process.revoke("h")
    assert reader.fetch(link, grant, (0,)).outcome is HandoffOutcome.STALE_LEASE


def test_a_killed_peer_is_lost_within_a_second_and_its_restart_is_served(reader: Reader) -> None:
    for generation in range(3):
        process = reader.start(seed=generation)
        grant = process.seal("h", [7, 2])
        link = reader.connect(process)
        result = reader.fetch(link, grant, (0, 1))
        assert result.outcome is HandoffOutcome.OK, result
        assert (reader.side.blocks[[0, 1]] == content(generation)[[7, 2]]).all()
        process.kill()
        began = time.monotonic()
        while (result := reader.fetch(link, grant, (2, 3))).outcome is HandoffOutcome.OK:
            assert time.monotonic() - began < 1.0
        assert result.outcome is HandoffOutcome.PEER_LOST, result
        assert time.monotonic() - began < 1.0
    assert reader.side.pool.pinned == set()


def test_a_kill_amid_a_stream_of_fetches_ends_them_all_typed(reader: Reader) -> None:
    process = reader.start()
    blocks = list(range(GEOMETRY.num_blocks))
    grant = process.seal("h", blocks)
    link = reader.connect(process)
    request = FetchRequest(
        transfer_id=0,
        remote_blocks=tuple(blocks),
        local_blocks=tuple(blocks),
        lease=grant.lease,
        slot=grant.slot,
        deadline_s=LIMIT_S,
    )
    transfers = []
    for number in range(200):
        transfers.append(reader.thread.fetch(link, replace(request, transfer_id=1000 + number)))
        if number == 100:
            process.kill()
    outcomes = [transfer.result.result(LIMIT_S).outcome for transfer in transfers]
    for transfer in transfers:
        transfer.quiet.result(LIMIT_S)
    assert set(outcomes) <= {HandoffOutcome.OK, HandoffOutcome.PEER_LOST}
    assert outcomes[-1] is HandoffOutcome.PEER_LOST
    assert reader.side.pool.pinned == set()


def test_a_peer_that_was_never_there_is_a_typed_failure(reader: Reader) -> None:
    process = reader.start()
    process.kill()
    process.process.wait(LIMIT_S)
    future = reader.thread.connect(process.peer)
    with pytest.raises(PeerLost):
        future.result(LIMIT_S)


def test_a_stale_incarnation_is_refused_after_its_successor_was_met(reader: Reader) -> None:
    first, second = reader.start(seed=1), reader.start(seed=2)
    reader.connect(first)
    grant = second.seal("h", [1])
    link = reader.connect(second)
    with pytest.raises(StaleIncarnation):
        reader.connect(first)
    assert reader.fetch(link, grant, (0,)).outcome is HandoffOutcome.OK
    assert second.peer.incarnation != first.peer.incarnation != new_incarnation()


_QUIET_PROGRAM = """
import sys
from core.config import set_worker_environment
set_worker_environment(1)
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Batch, OpState
from kvtransfer.memory import REGION_KV
from kvtransfer.plan import Copy
from tests.support.transfer_side import Side
p, d = Side(create_backend("nixl"), "P"), Side(create_backend("nixl"), "D")
link = d.backend.connect(p.peer)
op = d.backend.post(link, Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=(Copy(0, 0, 64),)))
while d.backend.poll(op).state is OpState.PENDING:
    pass
d.backend.disconnect(link)
assert d.backend.close() and p.backend.close()
assert "torch" not in sys.modules and "grpc" not in sys.modules
"""


def test_a_transfer_writes_nothing_to_our_standard_streams_and_needs_no_torch() -> None:
    command = [sys.executable, "-c", _QUIET_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
