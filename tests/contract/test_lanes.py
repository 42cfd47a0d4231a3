"""Where NIXL's bytes really go: through the kernel (cma), or through sockets when that is denied."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.backends import ucx

READER = """
import ctypes, json, struct, sys
DENY = sys.argv[1] == "deny"
if DENY:  # as container runtimes do: a seccomp filter, so that the system call answers EPERM
    code = {"x86_64": (310, 311), "aarch64": (270, 271)}[__import__("platform").machine()]
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, code[0]), (0x06, 0, 0, 0x00050001)]
    rules += [(0x15, 0, 1, code[1]), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("rules", ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Filter(len(rules), ctypes.addressof(program))), 0, 0) == 0
from core.config import set_worker_environment
set_worker_environment(1)
from kvtransfer.backends import create_backend
from tests.support.transfer_peer import PeerProcess
from tests.support.transfer_side import Side

has_fallback = sys.argv[2] == "tcp"
peer = PeerProcess("P", fallback=sys.argv[2])
side = Side(create_backend("nixl"), "D", fallback=create_backend("tcp") if has_fallback else None)
thread = side.thread()
thread.start()
try:
    thread.connect(peer.peer).result(20)
    report = thread.report(peer.peer).chosen
    answer = {"backend": report.backend, "rate": report.bytes_per_s, "connect_s": report.connect_s, "mode": report.mode}
    print(json.dumps({**answer, "reason": thread.report(peer.peer).reason}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
finally:
    thread.stop(5)
    peer.close()
"""


def read(deny: str, fallback: str = "none", **environ: str) -> dict[str, Any]:
    """What a reader in a process of its own (with a peer that inherits its restrictions) finds out."""
    root = Path(__file__).parents[2]
    base = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    result = subprocess.run(
        [sys.executable, "-c", READER, deny, fallback],
        cwd=root,
        env={**base, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


linux = pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked at as Linux shows them")


@linux
def test_reads_between_two_processes_of_one_machine_go_through_the_kernel() -> None:
    answer = read("allow")
    assert "error" not in answer, answer
    assert answer["rate"] > 0 and answer["mode"] == "read"
    assert answer["connect_s"] < 1.0, "connecting is done by the thread that moves data"


@linux
def test_with_tcp_as_the_only_transport_reads_are_seen_to_be_emulated() -> None:
    answer = read("allow", UCX_TLS="tcp")
    assert answer["error"] == "BackendFailed"
    assert "emulated over TCP" in answer["message"] and "UCX_TLS=tcp" in answer["message"]


@linux
def test_where_the_kernel_denies_cma_reads_are_seen_to_be_emulated_and_the_reason_is_named() -> None:
    answer = read("deny")
    assert answer["error"] == "BackendFailed"
    assert "emulated over TCP" in answer["message"]
    assert "cma is denied (Operation not permitted)" in answer["message"]


@linux
def test_a_pair_whose_kernel_denies_cma_uses_tcp_and_says_why() -> None:
    answer = read("deny", "tcp")
    assert (answer["backend"], answer["mode"]) == ("tcp", "serve"), answer
    assert "cma is denied (Operation not permitted)" in answer["reason"]


@linux
def test_the_kernel_lets_a_process_read_itself() -> None:
    data = (os.urandom(8), b"")
    assert ucx.why_no_cma(os.getpid(), id(data)) == ""
    assert ucx.why_no_cma(2**22 + 1, id(data)) != "", "no such process"


def test_a_process_sees_its_own_listeners_and_what_it_received() -> None:
    before = ucx.listeners()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as reader:
        ours = ucx.listeners() - before
        assert ours == {server.getsockname()[:2]}
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(bytes(50_000))
            received = b""
            while len(received) < 50_000:
                received += reader.recv(65536)
            assert ucx.bytes_received(theirs=ours, ours=frozenset()) == 50_000
            assert ucx.bytes_received(theirs=frozenset(), ours=frozenset()) == 0
