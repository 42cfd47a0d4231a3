"""The ``tcp`` backend over TLS: the same transfers, and nobody without a worker's certificate gets a byte."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.credentials import Credentials
from core.handoff import HandoffOutcome
from core.kv import KVGeometry
from core.made_certificates import issue, make_authority
from core.security_config import Identity
from kvtransfer.backends import create_backend, wire
from kvtransfer.backends.base import Backend, Batch, OpState
from kvtransfer.memory import REGION_KV
from kvtransfer.plan import Copy
from tests.contract.test_served_backends import LARGE, LIMIT_S, address_of, dial, finish, hello_to, is_closed, whole
from tests.support.tls import DOMAIN, MadeCluster
from tests.support.transfer_side import GEOMETRY, Side

Make = Callable[..., Side]


@pytest.fixture
def made(tmp_path: Path) -> MadeCluster:
    return MadeCluster(tmp_path)


@pytest.fixture
def sides(made: MadeCluster) -> Iterator[Make]:
    open_ones: list[Side] = []

    def make(
        worker_id: str, *, geometry: KVGeometry = GEOMETRY, identity: Identity = Identity.WORKER, has_tls: bool = True
    ) -> Side:
        credentials = Credentials(made.files(identity), identity) if has_tls else None
        open_ones.append(Side(create_backend("tcp", credentials=credentials), worker_id, geometry=geometry))
        return open_ones[-1]

    yield make
    for side in reversed(open_ones):
        side.backend.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("baton-tcp")]


def test_operations_of_any_size_cross_in_order(sides: Make) -> None:
    p, d = sides("P", geometry=LARGE), sides("D", geometry=LARGE)
    p.fill(1)
    link = d.backend.connect(p.peer)
    ops = [d.backend.post(link, batch) for _ in range(3) for batch in whole(d)]
    assert finish(d, ops[-1]).state is OpState.DONE
    assert {d.backend.poll(op).state for op in ops} == {OpState.DONE}
    assert link.num_pending == 0 and (d.kv.data == p.kv.data).all()


def test_requests_that_the_kernel_does_not_take_at_once_go_on_with_the_next_look(sides: Make) -> None:
    """Each names 20,000 runs, and all together are far more than a socket buffers."""
    p, d = sides("P", geometry=LARGE), sides("D", geometry=LARGE)
    p.fill(1)
    size = 16
    order = np.random.default_rng(0).permutation(20_000)
    copies = tuple(Copy(index * size, number * size, size) for number, index in enumerate(order.tolist()))
    batch = Batch(remote_region=REGION_KV, local_region=REGION_KV, copies=copies)
    link = d.backend.connect(p.peer)
    ops = [d.backend.post(link, batch) for _ in range(8)]
    assert [finish(d, op).state for op in ops] == [OpState.DONE] * 8
    expected = p.kv.data[: len(order) * size].reshape(-1, size)[order].reshape(-1)
    assert (d.kv.data[: len(expected)] == expected).all()


def test_nothing_of_the_blocks_can_be_read_on_the_way(sides: Make) -> None:
    p, d = sides("P"), sides("D")
    p.fill(1)
    address = address_of(p)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        heard, hang_up = _listen_in(middle, (address.host, address.port))
        elsewhere = replace(address, port=middle.getsockname()[1]).encode()
        peer = replace(p.peer, link=replace(p.peer.link, metadata=elsewhere))
        for op in [d.backend.post(d.backend.connect(peer), batch) for batch in whole(d)]:
            assert finish(d, op).state is OpState.DONE
        d.backend.close()
        hang_up()
    assert (d.kv.data == p.kv.data).all()
    assert len(heard) > p.kv.data.nbytes
    assert p.kv.data.tobytes()[:64] not in heard and address.token not in heard


def _listen_in(middle: socket.socket, to: tuple[str, int]) -> tuple[bytearray, Callable[[], None]]:
    """Everything that passes, and what to call when both ends are done."""
    heard = bytearray()

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        while data := _received(one):
            heard.extend(data)
            other.sendall(data)
        wire.shut(other)

    def run() -> None:
        dialler, _ = middle.accept()
        with dialler, socket.create_connection(to) as owner:
            back = threading.Thread(target=pass_on, args=(owner, dialler))
            back.start()
            pass_on(dialler, owner)
            back.join()

    running = threading.Thread(target=run)
    running.start()
    return heard, running.join


def test_who_does_not_speak_tls_is_disconnected_whatever_he_knows(sides: Make) -> None:
    p, plain = sides("P"), sides("D", has_tls=False)
    with dial(address_of(p), hello_to(address_of(p))) as sock:
        sock.settimeout(LIMIT_S)
        answered = b""
        while data := _received(sock):
            answered += data
        assert len(answered) < 64, "an alert of TLS at most"
    status = finish(plain, plain.backend.post(plain.backend.connect(p.peer), whole(plain)[0]))
    assert (status.state, status.cause) in (
        (OpState.FAILED, HandoffOutcome.PEER_LOST),
        (OpState.FAILED, HandoffOutcome.BACKEND_FAILED),
    )


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("whose", ["nobody's", "another CA's", "a gateway's"])
def test_a_dialler_without_a_workers_certificate_gets_no_answer(sides: Make, made: MadeCluster, whose: str) -> None:
    p = sides("P")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(made.folder / "ca.pem")
    if whose == "another CA's":
        made.write("stranger", issue(make_authority(), [f"worker.{DOMAIN}"]))
        context.load_cert_chain(made.folder / "stranger.pem", made.folder / "stranger.key")
    elif whose == "a gateway's":
        context.load_cert_chain(made.folder / "gateway.pem", made.folder / "gateway.key")
    address = address_of(p)
    with dial(address) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=f"worker.{DOMAIN}") as sock:
                sock.sendall(hello_to(address).encode())
                assert is_closed(sock)
        except OSError:
            pass  # cut off while it shook hands


def test_an_owner_without_a_workers_certificate_is_not_read_from(sides: Make) -> None:
    p, d = sides("P", identity=Identity.GATEWAY), sides("D")
    status = finish(d, d.backend.post(d.backend.connect(p.peer), whole(d)[0]))
    assert status.state is OpState.FAILED and "certificate" in status.detail


def test_an_owner_that_does_not_speak_tls_is_not_read_from(sides: Make) -> None:
    p, d = sides("P", has_tls=False), sides("D")
    assert finish(d, d.backend.post(d.backend.connect(p.peer), whole(d)[0])).state is OpState.FAILED


def test_a_handshake_that_never_ends_keeps_nobody_out(sides: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.2)
    p, d = sides("P"), sides("D")
    p.fill(1)
    idle = [dial(address_of(p)) for _ in range(5)]
    assert all(is_closed(sock) for sock in idle)
    for sock in idle:
        sock.close()
    assert finish(d, d.backend.post(d.backend.connect(p.peer), whole(d)[0])).state is OpState.DONE


def test_an_owner_that_closes_ends_its_readers_transfers(sides: Make) -> None:
    p, d = sides("P", geometry=LARGE), sides("D", geometry=LARGE)
    link = d.backend.connect(p.peer)
    ops = [d.backend.post(link, batch) for _ in range(8) for batch in whole(d)]
    finish(d, ops[0])
    assert p.backend.close()
    states = [finish(d, op).state for op in ops]
    assert states == sorted(states, key=lambda state: state is OpState.FAILED)
    assert d.backend.abort(link) and link.is_dead


def test_a_pair_reads_its_canary_and_measures_the_link(made: MadeCluster) -> None:
    credentials = Credentials(made.files("worker"), Identity.WORKER)

    def backend() -> Backend:
        return create_backend("tcp", credentials=credentials)

    p, d = Side(backend(), "P"), Side(backend(), "D")
    thread = d.thread()
    thread.start()
    try:
        report = thread.check(p.peer).result(LIMIT_S)
        assert report.chosen is not None and [link.error for link in report.links] == [None]
    finally:
        assert thread.stop(LIMIT_S)
        p.backend.close()
