"""Deterministic transfers between workers of one process, for tests: faults happen when the test says so.

Bytes move when an operation becomes terminal by poll, so an operation that was given up but not polled to its end
still writes late, as the real thing does. Time is counted in polls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.errors import BackendFailed, LayoutMismatch, PeerLost
from core.handoff import HandoffOutcome, LinkInfo, PeerInfo
from kvtransfer.backends.base import DONE, PENDING, Batch, Identity, Link, Op, OpState, OpStatus, check_bounds
from kvtransfer.layout import Region, region_of
from kvtransfer.memory import view_memory


@dataclass(slots=True)
class Fault:
    """What happens to one operation. The default is nothing: it is done at its first poll."""

    delay_polls: int = 0
    """PENDING for so many polls. -1: until :meth:`Fabric.resume`."""
    fail: str | None = None
    """FAILED with this text; nothing is written."""
    fail_after_bytes: int = 0
    """With ``fail``: so many bytes are written before."""
    flip: tuple[int, int] | None = None
    """(byte of the operation, mask to xor): corrupted in flight."""
    mangle: Callable[[NDArray[np.uint8]], None] | None = None
    """May change what the operation has brought, all its bytes in the order of its copies: corrupted in flight."""
    between: tuple[int, Callable[[], None]] | None = None
    """(bytes, what happens after so many of them were read): the source changes within the operation."""


@dataclass(slots=True, eq=False)
class _InprocOp(Op):
    batch: Batch | None = None
    fault: Fault = field(default_factory=Fault)


FaultHook = Callable[[Identity, PeerInfo, Batch], Fault | None]


class Fabric:
    """The "network": who is alive, and which faults apply."""

    def __init__(self) -> None:
        self._alive: dict[str, InprocBackend] = {}
        self._held: list[_InprocOp] = []
        self.on_post: FaultHook | None = None
        """Called for each operation; its Fault applies."""
        self.on_move: Callable[[Identity, Batch], None] | None = None
        """Called just before bytes of an operation are written into the memory of its reader."""
        self.on_done: Callable[[Batch], None] | None = None
        """Called after the bytes of an operation were moved, before it is seen as DONE."""

    def backend(self) -> "InprocBackend":
        return InprocBackend(self)

    def join(self, agent_name: str, backend: "InprocBackend") -> None:
        self._alive[agent_name] = backend

    def kill(self, agent_name: str) -> None:
        """The process is gone: operations on it fail, its own write nothing any more."""
        self._alive.pop(agent_name, None)

    def is_alive(self, agent_name: str) -> bool:
        return agent_name in self._alive

    def hold(self, op: _InprocOp) -> None:
        self._held.append(op)

    def resume(self) -> None:
        """Operations that hang may proceed."""
        for op in self._held:
            op.fault.delay_polls = 0
        self._held.clear()


class InprocBackend:
    """One worker's end. Addresses are real, so regions are declared and checked as with a real transport."""

    name = "inproc"

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._identity: Identity | None = None
        self._regions: dict[str, Region] = {}
        self._links: dict[str, Link] = {}
        self._closed = False

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        if self._fabric.is_alive(identity.agent_name):
            raise BackendFailed(f"an agent named {identity.agent_name} exists")
        self._identity = identity
        self._regions = {region.memory.name: region for region in regions}
        self._fabric.join(identity.agent_name, self)
        return LinkInfo(
            backend=self.name,
            agent_name=identity.agent_name,
            metadata=identity.agent_name.encode(),
            regions=tuple((r.memory.name, r.memory.address, r.memory.num_bytes) for r in regions),
        )

    def connect(self, peer: PeerInfo) -> Link:
        if peer.link.backend != self.name:
            raise LayoutMismatch(f"transfer backends differ: {self.name!r} != {peer.link.backend!r}")
        if not self._fabric.is_alive(peer.link.agent_name):
            raise PeerLost(f"no agent named {peer.link.agent_name}")
        return self._links.setdefault(peer.link.agent_name, Link(peer))

    def post(self, link: Link, batch: Batch) -> Op:
        check_bounds(batch, peer=link.peer, local=self._regions)
        assert self._identity is not None and not self._closed, "the backend is not open"
        hook = self._fabric.on_post
        fault = (hook(self._identity, link.peer, batch) if hook else None) or Fault()
        op = _InprocOp(link, batch=batch, fault=fault)
        link.num_pending += 1
        if fault.delay_polls < 0:
            self._fabric.hold(op)
        return op

    def poll(self, op: Op) -> OpStatus:
        assert isinstance(op, _InprocOp) and op.batch is not None
        if op.status.state is not OpState.PENDING or self._closed:
            return op.status
        link, fault = op.link, op.fault
        if not self._fabric.is_alive(link.peer.link.agent_name):
            link.is_dead = True
            return self._finish(op, OpStatus(OpState.FAILED, HandoffOutcome.PEER_LOST, "the peer's process is gone"))
        if fault.delay_polls != 0:
            fault.delay_polls -= 1 if fault.delay_polls > 0 else 0
            return PENDING
        if fault.fail is not None:
            self._move(op.batch, link.peer, fault, limit=fault.fail_after_bytes)
            return self._finish(op, OpStatus(OpState.FAILED, HandoffOutcome.BACKEND_FAILED, fault.fail))
        self._move(op.batch, link.peer, fault, limit=None)
        if self._fabric.on_done is not None:
            self._fabric.on_done(op.batch)
        return self._finish(op, DONE)

    def abort(self, link: Link) -> bool:
        return False

    def socket_bytes(self, link: Link) -> int:
        return 0

    def lane(self, link: Link) -> str:
        return "memory"

    def explain(self, link: Link) -> str:
        return ""

    def disconnect(self, link: Link) -> None:
        if link.num_pending:
            raise RuntimeError(f"{link.num_pending} operations are pending on {link.peer.link.agent_name}")
        self._links.pop(link.peer.link.agent_name, None)

    def close(self) -> bool:
        if self._closed:
            return True
        self._closed = True
        if self._identity is not None:
            self._fabric.kill(self._identity.agent_name)
        return all(link.num_pending == 0 for link in self._links.values())

    def _finish(self, op: _InprocOp, status: OpStatus) -> OpStatus:
        op.status = status
        op.link.num_pending -= 1
        return status

    def _move(self, batch: Batch, peer: PeerInfo, fault: Fault, *, limit: int | None) -> None:
        remote_base, _ = region_of(peer, batch.remote_region)
        local_base = self._regions[batch.local_region].memory.address
        if self._fabric.on_move is not None and self._identity is not None:
            self._fabric.on_move(self._identity, batch)
        pause_at, happen = fault.between or (0, None)
        done, targets = 0, []
        for remote_offset, local_offset, num_bytes in batch.copies:
            take = num_bytes if limit is None else min(num_bytes, limit - done)
            if take <= 0:
                break
            target, source = (
                view_memory(local_base + local_offset, take),
                view_memory(remote_base + remote_offset, take),
            )
            if happen is not None and done <= pause_at < done + take:
                target[: pause_at - done] = source[: pause_at - done]
                happen()
                target[pause_at - done :] = source[pause_at - done :]
            else:
                target[:] = source
            if fault.flip is not None and done <= fault.flip[0] < done + take:
                target[fault.flip[0] - done] ^= fault.flip[1]
            targets.append(target)
            done += take
        if fault.mangle is not None:
            _mangle(fault.mangle, targets)


def _mangle(change: Callable[[NDArray[np.uint8]], None], targets: list[NDArray[np.uint8]]) -> None:
    """Let ``change`` see (and change) scattered bytes as one array."""
    joined = np.concatenate(targets)
    change(joined)
    start = 0
    for target in targets:
        target[:] = joined[start : start + target.nbytes]
        start += target.nbytes
