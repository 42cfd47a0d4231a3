"""Backends whose owner sends: what a stranger, a liar or an old incarnation gets, what a lease that has ended gets, and
how a peer that is stopped or killed amid a transfer leaves the memory of both sides."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from core.errors import BackendFailed
from core.handoff import HandoffOutcome, LeaseRef
from core.ids import Incarnation, WorkerId
from core.kv import KVGeometry, MemoryRegion
from kvtransfer.backends import create_backend, owner, wire
from kvtransfer.backends.base import Batch, Identity, Op, OpState, OpStatus
from kvtransfer.backends.wire import Address, Hello, Request, Status
from kvtransfer.fetch import FetchRequest
from kvtransfer.layout import Region
from kvtransfer.memory import REGION_KV, REGION_SCRATCH, REGION_SLOTS
from kvtransfer.plan import Copy
from tests.support.transfer_peer import PeerProcess
from tests.support.transfer_side import GEOMETRY, Side

LIMIT_S = 15.0
LARGE = replace(GEOMETRY, num_blocks=1024, head_dim=64)
"""48 MiB, more than the kernel buffers: a transfer of all of it can be met under way."""


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.001)


def finish(d: Side, op: Op) -> OpStatus:
    wait_for(lambda: d.backend.poll(op).state is not OpState.PENDING, "the end of an operation")
    return op.status


def whole(side: Side, *, lease: LeaseRef | None = None, slot: int = 0, parts: int = 4) -> list[Batch]:
    """All blocks, in a few operations."""
    size = side.kv.data.nbytes // parts
    return [
        Batch(
            remote_region=REGION_KV,
            local_region=REGION_KV,
            copies=(Copy(part * size, part * size, size),),
            lease=lease,
            slot=slot,
        )
        for part in range(parts)
    ]


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(worker_id: str, *, backend: str = "tcp", geometry: KVGeometry = GEOMETRY) -> Side:
        made.append(Side(create_backend(backend), worker_id, geometry=geometry))
        return made[-1]

    yield make
    for side in reversed(made):
        side.backend.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("baton-tcp", "baton-dist"))], "threads end with close"


@pytest.fixture(params=["tcp", pytest.param("dist", marks=pytest.mark.soak)])
def served(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def process(served: str) -> Iterator[PeerProcess]:
    made = PeerProcess("P", seed=1, geometry=LARGE, backend=served)
    yield made
    made.process.send_signal(signal.SIGCONT)
    made.close()


def address_of(p: Side) -> Address:
    return Address.decode(p.peer.link.metadata)


def hello_to(address: Address) -> Hello:
    return Hello(token=address.token, owner=address.incarnation, dialler=Incarnation(7))


def dial(address: Address, hello: Hello | None = None) -> socket.socket:
    sock = socket.create_connection((address.host, address.port), timeout=LIMIT_S)
    if hello is not None:
        sock.sendall(hello.encode())
    return sock


def is_closed(sock: socket.socket) -> bool:
    """The other side ends the connection, and says nothing more."""
    sock.settimeout(LIMIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_a_wrong_token_and_another_incarnation_are_refused(sides: Callable[..., Side]) -> None:
    address = address_of(sides("P"))
    hello = hello_to(address)
    wrong = (
        (replace(hello, token=bytes(16)), "token"),
        (replace(hello, owner=Incarnation(hello.owner ^ 2)), "this is incarnation"),
    )
    for other, text in wrong:
        with dial(address, other) as sock:
            reply = wire.receive_reply(sock, within_s=LIMIT_S)
            assert reply.status is Status.REFUSED and text in reply.detail
            assert is_closed(sock)
    with dial(address, hello) as sock:
        assert wire.receive_reply(sock, within_s=LIMIT_S).status is Status.OK


def test_a_link_to_an_incarnation_that_is_gone_is_lost(sides: Callable[..., Side]) -> None:
    """Its successor may even listen on the same port."""
    old, d = sides("P"), sides("D")
    stale = replace(address_of(old), incarnation=Incarnation(old.identity.incarnation ^ 2))
    peer = replace(old.peer, link=replace(old.peer.link, metadata=stale.encode(), agent_name="P-old"))
    status = finish(d, d.backend.post(d.backend.connect(peer), whole(d)[0]))
    assert status.cause is HandoffOutcome.PEER_LOST and "this is incarnation" in status.detail


MALFORMED = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".ljust(200, b"\0"),
    "zeros": bytes(4096),
    "half a hello": b"BATONKV1",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=list(MALFORMED))
def test_who_says_anything_else_is_disconnected_in_time(sides: Callable[..., Side], data: bytes) -> None:
    p, d = sides("P"), sides("D")
    with dial(address_of(p)) as sock:
        sock.sendall(data)
        assert is_closed(sock)
    assert finish(d, d.backend.post(d.backend.connect(p.peer), whole(d)[0])).state is OpState.DONE


def test_requests_are_bounded_in_size_and_whoever_breaks_the_protocol_is_disconnected(
    sides: Callable[..., Side],
) -> None:
    p = sides("P")
    good = Request(op=1, region=REGION_KV, runs=np.array([(0, 64)], dtype=np.uint64)).encode()
    too_many = bytearray(good)
    struct.pack_into("<I", too_many, 4, wire.MAX_RUNS + 1)
    none_at_all = bytearray(good)
    struct.pack_into("<I", none_at_all, 4, 0)
    for frame in (bytes(too_many), bytes(none_at_all), b"EVIL" + good[4:]):
        with dial(address_of(p), hello_to(address_of(p))) as sock:
            wire.receive_reply(sock, within_s=LIMIT_S)
            sock.sendall(frame)
            assert is_closed(sock)


def test_idle_strangers_cannot_keep_peers_out(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MAX_GREETING", 3)
    monkeypatch.setattr(wire, "GREETING_S", 0.2)
    p, d = sides("P"), sides("D")
    strangers = [dial(address_of(p)) for _ in range(8)]
    assert all(is_closed(sock) for sock in strangers)
    for sock in strangers:
        sock.close()
    monkeypatch.undo()
    assert finish(d, d.backend.post(d.backend.connect(p.peer), whole(d)[0])).state is OpState.DONE


# -- what may be asked ------------------------------------------------------------------------------------------------

RUNS = {
    "behind the end": [(GEOMETRY.num_blocks * GEOMETRY.block_bytes - 32, 64)],
    "far away": [(2**63, 64)],
    "wrapping around": [(2**64 - 64, 128)],
    "longer than memory": [(0, 2**64 - 1)],
    "nothing": [(0, 0)],
    "one good and one bad": [(0, 64), (2**40, 64)],
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=list(RUNS))
def test_the_owner_itself_checks_the_bounds(sides: Callable[..., Side], runs: list[tuple[int, int]]) -> None:
    p = sides("P")
    with dial(address_of(p), hello_to(address_of(p))) as sock:
        wire.receive_reply(sock, within_s=LIMIT_S)
        sock.sendall(Request(op=1, region=REGION_KV, runs=np.array(runs, dtype=np.uint64)).encode())
        reply = wire.receive_reply(sock, within_s=LIMIT_S)
        assert (reply.op, reply.status) == (1, Status.OUTSIDE)
        sock.sendall(Request(op=2, region="secrets", runs=np.array([(0, 64)], dtype=np.uint64)).encode())
        assert wire.receive_reply(sock, within_s=LIMIT_S).status is Status.OUTSIDE


def test_a_peer_that_advertises_more_than_it_has_refuses_what_is_read_there(sides: Callable[..., Side]) -> None:
    p, d = sides("P"), sides("D")
    size = p.kv.data.nbytes
    regions = ((REGION_KV, p.kv.address, size + 4096),)
    liar = replace(p.peer, link=replace(p.peer.link, regions=regions))
    batch = Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=(Copy(size, 0, 64),))
    status = finish(d, d.backend.post(d.backend.connect(liar), batch))
    assert status.cause is HandoffOutcome.INCOMPATIBLE and "leaves the region" in status.detail


def test_a_lease_that_has_ended_is_not_served(sides: Callable[..., Side]) -> None:
    p, d = sides("P"), sides("D")
    p.fill(1)
    view, grant = p.seal("h", [3])
    link = d.backend.connect(p.peer)
    batch = whole(d, lease=grant.lease, slot=grant.slot, parts=1)[0]
    assert finish(d, d.backend.post(link, batch)).state is OpState.DONE
    p.leases.revoke(view.handoff_id, "revoked", now=0.0)
    d.kv.data[:] = 0
    for stale in (batch, replace(batch, slot=5), replace(batch, slot=10**6)):
        status = finish(d, d.backend.post(link, stale))
        assert status.state is OpState.FAILED
        assert status.cause is (HandoffOutcome.STALE_LEASE if stale.slot < 16 else HandoffOutcome.INCOMPATIBLE)
    assert not d.kv.data.any()
    assert finish(d, d.backend.post(link, replace(batch, lease=None))).state is OpState.DONE, "the link goes on"


def test_a_lease_that_ends_while_its_bytes_are_sent_fails_the_operation(sides: Callable[..., Side]) -> None:
    p = sides("P", geometry=LARGE)
    view, grant = p.seal("h", [3])
    num_bytes = p.kv.data.nbytes
    with dial(address_of(p), hello_to(address_of(p))) as sock:
        wire.receive_reply(sock, within_s=LIMIT_S)
        runs = np.array([(0, num_bytes)], dtype=np.uint64)
        sock.sendall(Request(op=1, region=REGION_KV, runs=runs, lease=grant.lease, slot=grant.slot).encode())
        assert wire.receive_reply(sock, within_s=LIMIT_S).status is Status.OK
        p.leases.revoke(view.handoff_id, "revoked", now=0.0)  # far more is left to send than the kernel can buffer
        wire.receive(sock, num_bytes, within_s=LIMIT_S)
        reply = wire.receive_reply(sock, within_s=LIMIT_S)
        assert (reply.op, reply.status) == (1, Status.STALE_LEASE)


def test_memory_of_a_device_is_refused_with_the_remedy(served: str) -> None:
    memory = MemoryRegion(name=REGION_KV, address=4096, num_bytes=64, device="cuda:0")
    identity = Identity(worker_id=WorkerId("X"), incarnation=Incarnation(1))
    with pytest.raises(BackendFailed, match=r"cuda:0.*nixl"):
        create_backend(served).open(identity, (Region(memory=memory),))


# -- order and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["tcp", "dist"])
def test_operations_of_a_link_are_served_in_order(sides: Callable[..., Side], served: str) -> None:
    p, d = sides("P", backend=served), sides("D", backend=served)
    p.fill(1)
    link = d.backend.connect(p.peer)
    ops = [d.backend.post(link, batch) for _ in range(50) for batch in whole(d)]
    assert link.num_pending == 200
    assert finish(d, ops[-1]).state is OpState.DONE
    assert {d.backend.poll(op).state for op in ops} == {OpState.DONE}
    assert link.num_pending == 0 and (d.kv.data == p.kv.data).all()


@pytest.mark.parametrize("served", ["tcp", "dist"])
def test_many_small_runs_cross_in_one_operation(sides: Callable[..., Side], served: str) -> None:
    p, d = sides("P", backend=served), sides("D", backend=served)
    p.fill(1)
    num_runs, size = 3000, 24
    order = np.random.default_rng(0).permutation(num_runs)
    copies = tuple(Copy(index * size, number * size, size) for number, index in enumerate(order.tolist()))
    batch = Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=copies)
    assert finish(d, d.backend.post(d.backend.connect(p.peer), batch)).state is OpState.DONE
    expected = p.kv.data[: num_runs * size].reshape(num_runs, size)[order].reshape(-1)
    assert (d.kv.data[: num_runs * size] == expected).all()


def test_what_was_posted_before_the_peer_died_fails_and_what_is_posted_after_it_too(
    process: PeerProcess, served: str
) -> None:
    d = Side(create_backend(served), "D", geometry=LARGE)
    link = d.backend.connect(process.peer)
    ops = [d.backend.post(link, batch) for _ in range(20) for batch in whole(d)]
    finish(d, ops[0])
    process.kill()
    statuses = [finish(d, op) for op in ops]
    states = [status.state for status in statuses]
    assert states == sorted(states, key=lambda state: state is OpState.FAILED), "in order: done, then lost"
    assert {status.cause for status in statuses if status.state is OpState.FAILED} == {HandoffOutcome.PEER_LOST}
    assert link.is_dead
    assert finish(d, d.backend.post(link, whole(d)[0])).cause is HandoffOutcome.PEER_LOST
    d.backend.disconnect(link)
    d.backend.close()


def test_no_byte_comes_late_after_an_abort_while_the_peer_was_stopped(process: PeerProcess, served: str) -> None:
    d = Side(create_backend(served), "D", geometry=LARGE)
    link = d.backend.connect(process.peer)
    ops = [d.backend.post(link, batch) for _ in range(3) for batch in whole(d)]
    finish(d, ops[0])
    os.kill(process.process.pid, signal.SIGSTOP)
    assert d.backend.abort(link)
    for op in ops:
        finish(d, op)
    assert ops[-1].status.cause is HandoffOutcome.BACKEND_FAILED, "a peer that was given up is not known to be dead"
    d.kv.data[:] = 0xA5
    d.backend.disconnect(link)
    os.kill(process.process.pid, signal.SIGCONT)
    again = d.backend.connect(process.peer)  # the owner is well, and has got so far that late bytes would be here
    copy = Copy(0, 64, 64)
    status = finish(
        d, d.backend.post(again, Batch(remote_region=REGION_SLOTS, local_region=REGION_SCRATCH, copies=(copy,)))
    )
    assert status.state is OpState.DONE
    assert (d.kv.data == 0xA5).all()
    d.backend.close()


def test_a_stall_ends_the_link_gives_the_blocks_back_and_the_peer_may_return(process: PeerProcess, served: str) -> None:
    d = Side(create_backend(served), "D", geometry=LARGE)
    thread = d.thread(stall_s=0.5)
    thread.start()
    blocks = list(range(LARGE.num_blocks))
    grant = process.seal("h", blocks)
    request = FetchRequest(
        transfer_id=1,
        remote_blocks=grant.block_ids,
        local_blocks=tuple(blocks),
        lease=grant.lease,
        slot=grant.slot,
        deadline_s=LIMIT_S,
    )
    link = thread.connect(process.peer).result(LIMIT_S)
    os.kill(process.process.pid, signal.SIGSTOP)
    transfer = thread.fetch(link, request)
    assert transfer.result.result(LIMIT_S).outcome is HandoffOutcome.STALLED
    transfer.quiet.result(LIMIT_S)
    assert d.pool.pinned == set()
    os.kill(process.process.pid, signal.SIGCONT)
    again = thread.connect(process.peer).result(LIMIT_S)
    assert again is not link
    transfer = thread.fetch(again, replace(request, transfer_id=2))
    assert transfer.result.result(LIMIT_S).outcome is HandoffOutcome.OK
    assert thread.stop(LIMIT_S)


def test_closing_ends_a_link_whose_peer_is_stopped(process: PeerProcess, served: str) -> None:
    d = Side(create_backend(served), "D", geometry=LARGE)
    link = d.backend.connect(process.peer)
    os.kill(process.process.pid, signal.SIGSTOP)
    op = d.backend.post(link, whole(d)[0])
    began = time.monotonic()
    assert not d.backend.close(), "an operation was pending"
    assert time.monotonic() - began < LIMIT_S / 2
    assert d.backend.poll(op).state is OpState.FAILED


def test_an_owner_closes_while_its_reader_does_not_read(sides: Callable[..., Side]) -> None:
    p = sides("P", geometry=LARGE)
    with dial(address_of(p), hello_to(address_of(p))) as sock:
        wire.receive_reply(sock, within_s=LIMIT_S)
        runs = np.array([(0, p.kv.data.nbytes)], dtype=np.uint64)
        sock.sendall(Request(op=1, region=REGION_KV, runs=runs).encode())
        wire.receive_reply(sock, within_s=LIMIT_S)
        began = time.monotonic()
        assert p.backend.close()
        assert time.monotonic() - began < LIMIT_S / 2


@pytest.mark.parametrize("served", ["tcp"], indirect=True)  # the readers here are bare sockets
@pytest.mark.parametrize("is_owner_stopped", [False, True])
def test_an_owner_outlives_readers_that_are_killed_amid_a_transfer(
    process: PeerProcess, served: str, is_owner_stopped: bool
) -> None:
    """UCX's emulation aborts the owner in such a case (docs/adr/0014)."""
    d = Side(create_backend(served), "D", geometry=LARGE)
    for _ in range(5):
        address = Address.decode(process.peer.link.metadata)
        reader = dial(address, hello_to(address))
        wire.receive_reply(reader, within_s=LIMIT_S)
        runs = np.array([(0, d.kv.data.nbytes)], dtype=np.uint64)
        frame = Request(op=1, region=REGION_KV, runs=runs).encode()
        reader.sendall(frame * 3)
        wire.receive_reply(reader, within_s=LIMIT_S)
        if is_owner_stopped:
            os.kill(process.process.pid, signal.SIGSTOP)
        # As the kernel does for a process that was killed with data unread: a reset.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.close()
        if is_owner_stopped:
            os.kill(process.process.pid, signal.SIGCONT)
    assert finish(d, d.backend.post(d.backend.connect(process.peer), whole(d)[0])).state is OpState.DONE
    assert process.process.poll() is None
    assert process.seal("h", [1]).block_ids == (1,), "it answers"
    d.backend.close()
