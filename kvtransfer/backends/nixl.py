"""Transfers by NIXL over UCX: one-sided READs (RDMA, cuda_ipc, shared memory), any pair, dynamic membership.

What NIXL 1.5 really does, and what follows (measured):

- A dead peer is reported by an *exception*, and only in error mode ``peer``, which needs ``tcp`` among UCX's
  transports (``UCX_TLS``, if it is set at all). Every exception of an operation is its terminal state here.
- Operations only progress on a target whose progress thread runs, so it runs on both sides. By default it spins; here
  it rests.
- ``check_remote_metadata`` is no liveness test; a hung peer is never reported: the transfer thread has its own
  deadline.
- A new process under an old agent name is refused, so the name contains the incarnation.
- For copies inside one machine ``transfer`` *is* the copy: it blocks, without the GIL.
- Descriptors prepared once as strided lists cost 33 us for 262144 of them instead of 24 ms; NIXL merges neighbours.

The wheel is ``nixl-cu12`` (or ``-cu13``, or ``nixl``); none of them imports torch. It logs to standard output; here
that goes to our logging instead. Environment read by the libraries at import: see ``core.config``.
"""

import importlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from core.config import ucx_transports
from core.errors import BackendFailed, ConfigError, LayoutMismatch, PeerLost
from core.handoff import HandoffOutcome, LinkInfo, PeerInfo
from core.kv import MemoryRegion
from kvtransfer.backends import ucx
from kvtransfer.backends.base import DONE, PENDING, Batch, Identity, Link, Op, OpState, OpStats, OpStatus, check_bounds
from kvtransfer.copies import Copies
from kvtransfer.layout import Region, region_of, unit_of
from kvtransfer.memory import REGION_SLOTS

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 1000
"""The longest that a target without events waits before it looks for work of its peers."""
_WHEELS = ("nixl_cu12", "nixl_cu13", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What we send beside NIXL's own metadata."""

    devices: dict[str, str] = field(default_factory=dict)
    """By region."""
    listeners: frozenset[ucx.Address] = frozenset()
    """Where UCX listens."""
    pid: int = 0
    host: str = ""
    transports: str = ""
    """``UCX_TLS``."""

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "listeners": sorted(self.listeners)}).encode()

    @classmethod
    def decode(cls, text: bytes) -> "_Header":
        """Raises ValueError for anything else than an encoded header."""
        try:
            fields = json.loads(text)
            return cls(
                devices={str(name): str(device) for name, device in fields["devices"].items()},
                listeners=frozenset((str(host), int(port)) for host, port in fields["listeners"]),
                pid=int(fields["pid"]),
                host=str(fields["host"]),
                transports=str(fields["transports"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error


@dataclass(slots=True, eq=False)
class _NixlLink(Link):
    agent_name: str = ""
    prepared: dict[str, Any] = field(default_factory=dict)
    """Region name -> prepared descriptor list of the peer's region, one descriptor a unit."""
    header: _Header = field(default_factory=_Header)


@dataclass(slots=True, eq=False)
class _NixlOp(Op):
    handle: Any = None


class NixlBackend:
    """One agent of this process. Several may exist in one process (tests); each is used by one thread."""

    name = "nixl"

    def __init__(self) -> None:
        self._api, bindings = _load()
        self._bindings = bindings
        self._errors: tuple[type[Exception], ...] = (*_exceptions(bindings), RuntimeError)
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self._agent: Any = None
        self._regions: dict[str, Region] = {}
        self._prepared: dict[str, Any] = {}
        self._links: dict[str, _NixlLink] = {}
        self._listeners: frozenset[ucx.Address] = frozenset()

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        assert self._agent is None, "the backend is open"
        before = ucx.listeners()
        config = self._api.nixl_agent_config(enable_prog_thread=True, capture_telemetry=True, backends=[])
        try:
            with _resting_progress_thread(self._bindings):
                agent = self._api.nixl_agent(identity.agent_name, config)
            agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            for region in regions:
                agent.register_memory([(*_location(region.memory), "")], _memory_kind(region.memory.device))
                self._prepared[region.memory.name] = _prepare(
                    agent, "NIXL_INIT_AGENT", region.memory, region.unit_bytes
                )
            blob = agent.get_agent_metadata()
        except self._errors as error:
            self._prepared.clear()
            raise BackendFailed(f"NIXL could not start ({error}); if UCX_TLS is set it must contain tcp") from error
        self._agent = agent
        self._regions = {region.memory.name: region for region in regions}
        self._listeners = ucx.listeners() - before
        header = _Header(
            devices={r.memory.name: r.memory.device for r in regions},
            listeners=self._listeners,
            pid=os.getpid(),
            host=ucx.host(),
            transports=ucx_transports(),
        )
        return LinkInfo(
            backend=self.name,
            agent_name=identity.agent_name,
            metadata=header.encode() + b"\n" + blob,
            regions=tuple((r.memory.name, r.memory.address, r.memory.num_bytes) for r in regions),
        )

    def connect(self, peer: PeerInfo) -> Link:
        if peer.link.backend != self.name:
            raise LayoutMismatch(f"transfer backends differ: {self.name!r} != {peer.link.backend!r}")
        known = self._links.get(peer.link.agent_name)
        if known is not None:
            return known
        text, _, blob = peer.link.metadata.partition(b"\n")
        try:
            header = _Header.decode(text)
        except ValueError as error:
            raise LayoutMismatch(f"{peer.worker_id} sent link metadata that cannot be read") from error
        try:
            name = self._agent.add_remote_agent(blob)
        except self._errors as error:
            # It connects while it loads: a process that is gone shows here, as a backend error.
            raise PeerLost(f"{peer.link.agent_name} cannot be reached by NIXL: {error}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        link = _NixlLink(peer, agent_name=name, header=header)
        if name != peer.link.agent_name:
            self._forget(link)
            raise LayoutMismatch(f"link metadata of {peer.link.agent_name} names the agent {name}")
        self._links[name] = link
        return link

    def post(self, link: Link, batch: Batch) -> Op:
        assert isinstance(link, _NixlLink)
        check_bounds(batch, peer=link.peer, local=self._regions)
        op = _NixlOp(link)
        link.num_pending += 1
        if link.is_dead:
            return self._finish(op, _lost(link))
        try:
            op.handle = self._make(link, batch)
            state = self._agent.transfer(op.handle)
        except self._errors as error:
            return self._failed(op, error)
        if state == "DONE":
            self._finish(op, DONE)
        elif state != "PROC":
            self._finish(op, OpStatus(OpState.FAILED, HandoffOutcome.BACKEND_FAILED, f"NIXL posted with state {state}"))
        return op

    def poll(self, op: Op) -> OpStatus:
        assert isinstance(op, _NixlOp)
        if op.status.state is not OpState.PENDING or self._agent is None:
            return op.status
        try:
            state = self._agent.check_xfer_state(op.handle)
        except self._errors as error:
            return self._failed(op, error).status
        if state == "DONE":
            return self._finish(op, DONE).status
        if op.link.is_dead:
            return self._finish(op, _lost(op.link)).status
        if state == "PROC":
            return PENDING
        failed = OpStatus(OpState.FAILED, HandoffOutcome.BACKEND_FAILED, f"NIXL state {state}")
        return self._finish(op, failed).status

    def abort(self, link: Link) -> bool:
        return False

    def socket_bytes(self, link: Link) -> int:
        """A reader is read by nobody: whatever comes over connections made to its own listeners is what it reads."""
        assert isinstance(link, _NixlLink)
        return ucx.bytes_received(theirs=link.header.listeners, ours=self._listeners)

    def lane(self, link: Link) -> str:
        """What UCX has for such memory when it is not TCP; which of them it takes it tells nobody."""
        assert isinstance(link, _NixlLink)
        if link.header.host != ucx.host():
            return "rdma"
        return "cma" if set(link.header.devices.values()) == {"cpu"} else "cuda_ipc"

    def explain(self, link: Link) -> str:
        assert isinstance(link, _NixlLink)
        header = link.header
        settings = {where: tls for where, tls in (("here", ucx_transports()), ("there", header.transports)) if tls}
        told = [f"UCX_TLS={tls} {where}" for where, tls in settings.items()]
        if header.host != ucx.host():
            return ", ".join(["the peer is on another host, or in another container, without RDMA between", *told])
        refusal = ucx.why_no_cma(header.pid, region_of(link.peer, REGION_SLOTS)[0])
        return ", ".join([f"cma is denied ({refusal})", *told] if refusal else told)

    def disconnect(self, link: Link) -> None:
        assert isinstance(link, _NixlLink)
        if link.num_pending:
            raise RuntimeError(f"{link.num_pending} operations are pending on {link.agent_name}")
        if self._links.pop(link.agent_name, None) is not None:
            self._forget(link)

    def close(self) -> bool:
        if self._agent is None:
            return True
        clean = all(link.num_pending == 0 for link in self._links.values())
        for link in list(self._links.values()):
            if link.num_pending == 0:
                self.disconnect(link)
            link.prepared.clear()
        self._links.clear()
        self._prepared.clear()
        self._agent = None
        return clean

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make(self, link: _NixlLink, batch: Batch) -> Any:
        unit = unit_of(link.peer, batch.remote_region)
        local = self._regions[batch.local_region]
        if unit == local.unit_bytes:
            indices = _unit_indices(batch, unit)
            if indices is not None:
                remote_ids, local_ids = indices
                remote_list = self._prepared_remote(link, batch.remote_region, unit)
                return self._agent.make_prepped_xfer(
                    "READ", self._prepared[batch.local_region], local_ids, remote_list, remote_ids
                )
        base, num_bytes = region_of(link.peer, batch.remote_region)
        device = link.header.devices.get(batch.remote_region, "cpu")
        remote = MemoryRegion(name=batch.remote_region, address=base, num_bytes=num_bytes, device=device)
        rows = [(copy.remote_offset, copy.num_bytes) for copy in batch.copies]
        remote_descs = self._descs(remote, rows)
        local_descs = self._descs(local.memory, [(copy.local_offset, copy.num_bytes) for copy in batch.copies])
        return self._agent.initialize_xfer("READ", local_descs, remote_descs, link.agent_name)

    def _descs(self, memory: MemoryRegion, rows: Sequence[tuple[int, int]]) -> Any:
        base, _, device = _location(memory)
        descs = [(base + offset, num_bytes, device) for offset, num_bytes in rows]
        return self._agent.get_xfer_descs(descs, _memory_kind(memory.device))

    def _prepared_remote(self, link: _NixlLink, region: str, unit: int) -> Any:
        if region not in link.prepared:
            base, num_bytes = region_of(link.peer, region)
            device = link.header.devices.get(region, "cpu")
            memory = MemoryRegion(name=region, address=base, num_bytes=num_bytes, device=device)
            link.prepared[region] = _prepare(self._agent, link.agent_name, memory, unit)
        return link.prepared[region]

    def _failed(self, op: _NixlOp, error: Exception) -> _NixlOp:
        assert isinstance(op.link, _NixlLink)
        if isinstance(error, self._disconnected):
            op.link.is_dead = True
            return self._finish(op, _lost(op.link))
        text = f"{type(error).__name__}: {error}"
        return self._finish(op, OpStatus(OpState.FAILED, HandoffOutcome.BACKEND_FAILED, text))

    def _finish(self, op: _NixlOp, status: OpStatus) -> _NixlOp:
        op.status = status
        op.link.num_pending -= 1
        handle, op.handle = op.handle, None
        if handle is not None:
            if status is DONE:
                op.stats = self._telemetry(handle)
            try:
                handle.release()
            except self._errors as error:
                log.warning("nixl kept a finished handle", extra={"error": str(error)})
        return op

    def _telemetry(self, handle: Any) -> OpStats | None:
        """NIXL's own times. Its transfer time ends at the poll that noticed, so our sleep between two is in it."""
        try:
            told = self._agent.get_xfer_telemetry(handle)
        except self._errors:
            return None
        post_s, total_s = 1e-6 * told.postDuration, 1e-6 * told.xferDuration
        return OpStats(post_s=post_s, move_s=max(0.0, total_s - post_s), num_descriptors=told.descCount)

    def _forget(self, link: _NixlLink) -> None:
        link.prepared.clear()
        try:
            self._agent.remove_remote_agent(link.agent_name)
        except self._errors as error:
            log.info("nixl had forgotten the agent", extra={"agent": link.agent_name, "error": str(error)})


def _lost(link: Link) -> OpStatus:
    return OpStatus(OpState.FAILED, HandoffOutcome.PEER_LOST, f"{link.peer.link.agent_name} disconnected")


def _unit_indices(batch: Batch, unit: int) -> tuple[Any, Any] | None:
    """Indices into the prepared lists, or None when a copy is not made of whole units."""
    copies = Copies.of(batch.copies).array
    if (copies % unit).any():
        return None
    counts = copies[:, 2] // unit
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    remote = np.repeat(copies[:, 0] // unit, counts) + steps
    local = np.repeat(copies[:, 1] // unit, counts) + steps
    return remote.astype(np.int32), local.astype(np.int32)


def _prepare(agent: Any, owner: str, memory: MemoryRegion, unit: int) -> Any:
    """One descriptor for each whole unit of the region."""
    address, num_bytes, device = _location(memory)
    strided = np.array([[address, unit, device, unit, num_bytes // unit]], dtype=np.uint64)
    return agent.prep_xfer_dlist(owner, strided, _memory_kind(memory.device))


def _location(memory: MemoryRegion) -> tuple[int, int, int]:
    """(address, bytes, device number)."""
    _, _, number = memory.device.partition(":")
    return memory.address, memory.num_bytes, int(number or 0)


def _memory_kind(device: str) -> str:
    return "VRAM" if device.startswith("cuda") else "DRAM"


def _exceptions(bindings: Any) -> list[type[Exception]]:
    members = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
    return [member for member in members if isinstance(member, type) and issubclass(member, Exception)]


def plugins() -> tuple[str, ...]:
    """What the installed NIXL can move memory with. Raises ConfigError where there is none."""
    api, _ = _load()
    agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=[]))
    return tuple(sorted(agent.get_plugin_list()))


def _load() -> tuple[Any, Any]:
    """(api module, bindings module) of the first wheel that is installed. Raises ConfigError when none is."""
    for wheel in _WHEELS:
        try:
            api = importlib.import_module(f"{wheel}._api")
            bindings = importlib.import_module(f"{wheel}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(
                f"transfer.backend: nixl is installed as {wheel} but cannot be loaded: {error}"
            ) from error
        _tame_logging()
        return api, bindings
    raise ConfigError(
        "transfer.backend: nixl is not installed; `pip install nixl-cu12` (or nixl-cu13), or choose another backend"
    )


@contextmanager
def _resting_progress_thread(bindings: Any) -> Iterator[None]:
    """Agents made meanwhile have a progress thread that sleeps in ``poll`` until there is work, or for the delay.

    The wheel's Python side fixes that delay at 0, and the thread spins: measured, a third of a busy core and all of a
    free one in every worker, idle or not, taken from the model's steps. The native configuration has the field; only
    the assignment of 0 is in the way, so that one is replaced.
    """
    native = bindings.nixlAgentConfig

    def assign(config: Any, name: str, value: Any) -> None:
        native.__setattr__(config, name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = type("AgentConfig", (native,), {"__setattr__": assign})
    try:
        yield
    finally:
        bindings.nixlAgentConfig = native


def _tame_logging() -> None:
    """The wheel's Python side writes to standard output and turns logging errors off for everybody: undo both."""
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    logging.raiseExceptions = True
