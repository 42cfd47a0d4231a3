"""A prefill worker and a decode worker as two processes on the one device, with a hand-off between them: lease, READ,
lease slot, digests on both sides, and then the answer, which must be that of one engine that did it all.

The clock runs from the moment P knows its last step's end (its token is on the host) to the moment D may start a step:
P's digests, the grant's way through a pipe, the transfer, D's digests and the verdict are in it.
"""

import json
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.end import NoPool
from bench.on_gpu.setup import Setup, stream
from core.clock import MonotonicClock
from core.handoff import DigestKind, HandoffOutcome, LeaseRef, LinkInfo, PeerInfo
from core.ids import HandoffId, LeaseId, WorkerId, new_incarnation
from engine.engine import Engine
from engine.kernels.digest import compiled_wsum64
from kvtransfer import digest as digests
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Identity
from kvtransfer.canary import CanaryMemory
from kvtransfer.custody import Custody
from kvtransfer.device_digest import DeviceDigester
from kvtransfer.digest import Digester
from kvtransfer.fetch import FetchRequest
from kvtransfer.layout import Region, kv_region
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import Scratch
from kvtransfer.slot import SlotMemory
from kvtransfer.transfer_thread import TransferThread

LIMIT_S = 60.0
NUM_ANSWER = 8


class Side:
    """One worker's engine and what its transfers need."""

    def __init__(self, setup: Setup, worker_id: str) -> None:
        sizes = setup.sizes
        blocks = 2 * -(-(sizes.hand_over + NUM_ANSWER) // 16) + 8
        self.engine: Engine = setup.engine(num_blocks=blocks, max_sequences=2)
        geometry = self.engine.geometry
        self.slots, self.scratch = SlotMemory(16), Scratch(16)
        self.backend: Backend = create_backend("nixl")
        identity = Identity(worker_id=WorkerId(worker_id), incarnation=new_incarnation())
        self.canary = CanaryMemory(identity.incarnation, geometry)
        regions = (
            kv_region(self.engine.kv_region, geometry),
            Region(memory=self.slots.region()),
            Region(memory=self.scratch.region()),
            *self.canary.regions(),
        )
        self.link: LinkInfo = self.backend.open(identity, regions)
        self.identity = identity
        memory = self.engine.device_memory
        self.digester: Digester = (
            DeviceDigester(DigestKind.WSUM64, geometry, memory)
            if memory is not None
            else Digester.at_address(DigestKind.WSUM64, geometry, self.engine.kv_region.address, sums=compiled_wsum64())
        )

    def peer(self) -> dict[str, Any]:
        """What the other side must know, as plain values."""
        return {
            "worker_id": self.identity.worker_id,
            "incarnation": self.identity.incarnation,
            "backend": self.link.backend,
            "agent_name": self.link.agent_name,
            "metadata": self.link.metadata.hex(),
            "regions": self.link.regions,
            "canary": self.canary.digest.hex(),
        }

    def peer_info(self, told: dict[str, Any]) -> PeerInfo:
        """The other side is built like this one."""
        return PeerInfo(
            worker_id=WorkerId(told["worker_id"]),
            incarnation=told["incarnation"],
            format=self.engine.format,
            geometry=self.engine.geometry,
            link=LinkInfo(
                backend=told["backend"],
                agent_name=told["agent_name"],
                metadata=bytes.fromhex(told["metadata"]),
                regions=tuple((str(name), int(address), int(size)) for name, address, size in told["regions"]),
            ),
            canary_digest=bytes.fromhex(told["canary"]),
        )


def hand_over(setup: Setup, folder: Path) -> dict[str, Any]:
    """Milliseconds of hand-overs, and whether every token was that of one engine."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_prefill, args=(theirs, str(setup.device), str(folder), setup.seed))
    child.start()
    theirs.close()
    try:
        return _decode(setup, ours)
    finally:
        ours.close()
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()


def _receive(connection: Connection) -> dict[str, Any]:
    if not connection.poll(LIMIT_S):
        raise TimeoutError(f"the other process said nothing for {LIMIT_S:.0f} s")
    told: dict[str, Any] = json.loads(connection.recv_bytes())
    if "error" in told:
        raise RuntimeError(f"the other process: {told['error']}")
    return told


def _send(connection: Connection, told: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(told).encode())


def _prefill(connection: Connection, device: str, folder: str, seed: int) -> None:
    """The child: computes prompts, holds their blocks, frees them when told."""
    own = Path(folder) / f"p-{os.getpid()}"
    own.mkdir()
    try:
        side = Side(Setup(device, own, seed=seed), "P")
        leases = LeaseTable(
            side.slots, block_bytes=side.engine.geometry.block_bytes, lease_s=600.0, quota_bytes=1 << 60
        )
        _send(connection, side.peer())
        while True:
            order = json.loads(connection.recv_bytes())
            if not order["prompt"]:
                return
            _send(connection, _hold(side, leases, order["prompt"], order["name"]))
            connection.recv_bytes()  # D has read it: the blocks are ours again
            side.engine.pool.free(_held.pop())
    except EOFError:
        return
    except Exception as error:
        _send(connection, {"error": f"{type(error).__name__}: {error}"[:500]})
        raise


_held: list[list[int]] = []


def _hold(side: Side, leases: LeaseTable, prompt: list[int], name: str) -> dict[str, Any]:
    engine = side.engine
    sequence = stream(name, prompt, NUM_ANSWER, pause_at=len(prompt) + 1)
    engine.add(sequence)
    began = time.monotonic()
    while engine.has_work:
        engine.step()
    ended = time.monotonic()
    engine.detach(sequence.key)
    blocks = sequence.block_table[: engine.geometry.blocks_for(len(prompt))]
    _held.append(sequence.block_table)
    made = side.digester.digest(blocks)
    digested = time.monotonic()
    lease = leases.open(HandoffId(name), num_blocks=len(blocks), deadline_s=600.0, now=ended)
    leases.seal(lease.ref.lease_id, blocks, digest=digests.combine(DigestKind.WSUM64, made), now=ended)
    return {
        "ended": ended,
        "prefill_s": ended - began,
        "digest_s": digested - ended,
        "blocks": blocks,
        "token": sequence.tokens[-1],
        "digests": made.hex(),
        "lease_id": lease.ref.lease_id,
        "epoch": lease.ref.epoch,
        "slot": lease.slot,
    }


def _decode(setup: Setup, connection: Connection) -> dict[str, Any]:
    side = Side(setup, "D")
    engine = side.engine
    thread = TransferThread(
        side.backend,
        geometry=engine.geometry,
        scratch=side.scratch,
        landing=side.canary.landing,
        custody=Custody(NoPool()),
        clock=MonotonicClock(),
        name="transfer",
    )
    thread.start()
    try:
        peer = side.peer_info(_receive(connection))
        began = time.monotonic()
        link = thread.connect(peer).result(LIMIT_S)
        figures: dict[str, Any] = {"connect_s": time.monotonic() - began, "lane": side.backend.lane(link)}
        rounds = []
        for number in range(4 if setup.is_gpu else 1):
            prompt = random.Random(number).choices(range(2, 250), k=setup.sizes.hand_over)
            name = f"r{number}"
            _send(connection, {"prompt": prompt, "name": name})
            told = _receive(connection)
            rounds.append(_take(side, thread, link, told, prompt, name, number))
            _send(connection, {})
        _send(connection, {"prompt": []})
        counted = rounds[1:] or rounds  # the first one compiles and connects
        figures["rounds"] = rounds
        figures["tokens"] = setup.sizes.hand_over
        figures["ms"] = statistics.median(each["hand_over_s"] for each in counted) * 1e3
        figures["is_equal"] = all(each["is_equal"] for each in rounds)
        return figures
    finally:
        thread.stop(5.0)
        engine.close()


def _take(
    side: Side, thread: TransferThread, link: Any, told: dict[str, Any], prompt: list[int], name: str, number: int
) -> dict[str, Any]:
    engine = side.engine
    local = engine.pool.allocate(len(told["blocks"]))
    posted = time.monotonic()
    transfer = thread.fetch(
        link,
        FetchRequest(
            transfer_id=number,
            remote_blocks=tuple(told["blocks"]),
            local_blocks=tuple(local),
            lease=LeaseRef(lease_id=LeaseId(told["lease_id"]), epoch=told["epoch"]),
            slot=told["slot"],
            deadline_s=LIMIT_S,
        ),
    )
    result = transfer.result.result(LIMIT_S)
    if result.outcome is not HandoffOutcome.OK:
        raise RuntimeError(f"the fetch ended with {result.outcome}: {result.detail}")
    arrived = time.monotonic()
    made = side.digester.digest(local)
    digests.verify(bytes.fromhex(told["digests"]), made, num_kv_heads=engine.geometry.num_kv_heads)
    verified = time.monotonic()
    tokens = [*prompt, told["token"]]
    handed = stream(
        name, tokens, NUM_ANSWER, num_computed=len(prompt), block_table=local, num_prompt_tokens=len(prompt)
    )
    whole = stream(f"{name}-unified", prompt, NUM_ANSWER)
    for sequence in (handed, whole):
        engine.add(sequence)
        while engine.has_work:
            engine.step()
    return {
        "hand_over_s": verified - told["ended"],
        "prefill_s": told["prefill_s"],
        "digest_at_p_s": told["digest_s"],
        "way_s": posted - told["ended"] - told["digest_s"],
        "transfer_s": arrived - posted,
        "digest_at_d_s": verified - arrived,
        "bytes": result.num_bytes,
        "is_equal": handed.tokens == whole.tokens,
        "tokens": handed.tokens[len(prompt) :],
        "unified": whole.tokens[len(prompt) :],
    }
