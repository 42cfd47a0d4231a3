"""Both ends of transfers in processes of their own, started in a tenth of a second by a program that forks.

``Nursery`` is that program, ``End`` one of its children: a worker's memory, leases, block pool and transfer thread
(``end_program``), which does what it is asked in lines of JSON. An End can be killed, stopped and continued, and can
do that to another at a certain byte of a transfer.
"""

import array
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from core.handoff import DigestKind, Grant, LeaseRef
from core.ids import LeaseId
from core.kv import KVGeometry
from tests.support.transfer_side import GEOMETRY

LIMIT_S = 60.0
"""For whatever must happen, on the slowest of machines."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A way in which bytes move between two processes of one machine."""

    backend: str
    environ: Mapping[str, str] = field(default_factory=dict)
    writes_late: bool = False
    """Given up, it may still write to the reader's memory for as long as it is not terminal."""
    owner_can_die: bool = False
    """A reader that dies while the owner is paused takes the owner with it (UCX's emulation of reads over TCP)."""


TRANSPORTS = {
    "cma": Transport(backend="nixl"),  # the kernel copies, within the post
    # What was given up drains over these two; the connection is ended only when that stalls.
    "tcp": Transport(backend="tcp", writes_late=True),
    "dist": Transport(backend="dist", writes_late=True),
    "ucx-tcp": Transport(backend="nixl", environ={"UCX_TLS": "tcp"}, writes_late=True, owner_can_die=True),
}


class EndDied(Exception):
    """The process is gone; it did not answer."""


class Nursery:
    """``with Nursery() as nursery``: its children end with it."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.end_program", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self.ends: list[End] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for end in self.ends:
                end.close()
        finally:
            self._socket.close()
            self._process.wait(LIMIT_S)

    def start(
        self,
        worker_id: str,
        transport: str,
        *,
        geometry: KVGeometry = GEOMETRY,
        seed: int = 1,
        stall_s: float = LIMIT_S,
        has_custody: bool = True,
    ) -> "End":
        """A worker whose memory holds the content of ``seed``, over a backend of its own. Without custody its blocks
        under transfer are free as soon as nobody uses them."""
        ours, theirs = socket.socketpair()
        order = {
            "worker_id": worker_id,
            "backend": TRANSPORTS[transport].backend,
            "geometry": asdict(geometry),
            "seed": seed,
            "stall_s": stall_s,
            "has_custody": has_custody,
            "environ": dict(TRANSPORTS[transport].environ),
        }
        handle = array.array("i", [theirs.fileno()])
        self._socket.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handle)])
        theirs.close()
        pid = json.loads(self._socket.recv(64))
        end = End(pid, ours)
        self.ends.append(end)
        return end


class End:
    """One worker of a pair, as holder and as reader."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._socket = connection
        self._lines = connection.makefile("rw")
        self._socket.settimeout(LIMIT_S)
        self.peer: Answer = self._answer()
        """How it is reached; the argument of another's ``connect``."""

    # -- as holder ----------------------------------------------------------------------------------------------------

    def seal(self, handoff_id: str, blocks: list[int]) -> Grant:
        fields = self.ask("seal", handoff_id=handoff_id, blocks=blocks)
        return Grant(
            lease=LeaseRef(lease_id=LeaseId(fields["lease_id"]), epoch=fields["epoch"]),
            slot=fields["slot"],
            block_ids=tuple(blocks),
            first_block=0,
            num_tokens=len(blocks),
            digest=DigestKind.WSUM64,
            digests=bytes.fromhex(fields["digests"]),
        )

    # -- as reader ----------------------------------------------------------------------------------------------------

    def fetch(self, holder: Answer, grant: Grant, **options: Any) -> int:
        """Begin to read a grant of a connected holder. See ``end_program`` for the options. Returns a number."""
        self.tell_fetch(holder, grant, **options)
        number: int = self._answer()["number"]
        return number

    def tell_fetch(self, holder: Answer, grant: Grant, **options: Any) -> None:
        """The same for one that may be gone before it answers."""
        self.tell("fetch", holder=holder["worker_id"], grant=_to_json(grant), **options)

    def read(
        self, holder: Answer, grant: Grant, local: list[int], *, first_remote_block: int = 0, first_local_block: int = 0
    ) -> Answer:
        """Read what this rank takes from a connected rank, whatever its geometry; answers with the verdict."""
        places = {"first_remote_block": first_remote_block, "first_local_block": first_local_block}
        return self.ask("read", peer=holder, grant=_to_json(grant), local=local, **places)

    def memory(self) -> bytes:
        """All its blocks, as they lie."""
        return base64.b64decode(self.ask("memory")["kv"])

    def result(self, number: int) -> Answer:
        """How a fetch ended, whether it may be published and whether that is right. Waits for it."""
        return self.ask("result", number=number)

    # -- as a process -------------------------------------------------------------------------------------------------

    def ask(self, what: str, **arguments: Any) -> Answer:
        """Raises EndDied when it is gone."""
        self.tell(what, **arguments)
        return self._answer()

    def tell(self, what: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        try:
            self._lines.write(json.dumps({"do": what, **arguments}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise EndDied(what) from error

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.wait_gone()

    def stop(self) -> None:
        """SIGSTOP, and wait until nothing of it runs."""
        self.send(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Until somebody's SIGSTOP has stopped every thread of it."""
        until = time.monotonic() + LIMIT_S
        while not self._is_stopped():
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        states = []
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{thread}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
        return set(states) == {"T"}

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def wait_gone(self) -> None:
        """Until its end of the connection is closed."""
        try:
            while self._lines.readline():
                pass
        except ConnectionResetError:
            pass

    def close(self) -> None:
        """It ends when nobody talks to it any more; also one that was stopped. Idempotent."""
        if self._lines.closed:
            return
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)
            self.resume()
        self.wait_gone()
        with suppress(OSError):  # what was still to be said to it
            self._lines.close()
        self._socket.close()

    def _answer(self) -> Answer:
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        if not line.endswith("\n"):
            raise EndDied(f"process {self.pid} is gone")
        answer: Answer = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer


def _to_json(grant: Grant) -> Answer:
    return {
        "lease": asdict(grant.lease),
        "slot": grant.slot,
        "blocks": list(grant.block_ids),
        "digests": grant.digests.hex(),
    }
