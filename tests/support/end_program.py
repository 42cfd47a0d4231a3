"""The program behind ``transfer_ends``: forks an End for each order that comes on the socket given as argument.

An End answers each line of JSON with one. What it can be asked are the methods of ``_End`` without the ``do_``.
"""

import array
import base64
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.config import set_worker_environment, ucx_transports
from core.errors import ServingError
from core.handoff import DigestKind, Grant, HandoffOutcome, LeaseRef
from core.ids import HandoffId, LeaseId
from core.kv import KVGeometry, KVOrder
from engine.block_pool import BlockPool
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Link
from kvtransfer.backends.nixl import _load
from kvtransfer.custody import Custody
from kvtransfer.fetch import FetchRequest, FetchResult, Transfer
from kvtransfer.plan import Blocks
from kvtransfer.ranks import held_box, shared_box
from kvtransfer.validate import check_read
from tests.support.transfer_peer import peer_from_json, peer_to_json
from tests.support.transfer_side import Side

LIMIT_S = 60.0
Answer = dict[str, Any]


def main(handle: int) -> None:
    """One order, one child. Children are nobody's to wait for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    set_worker_environment(1)
    _load_nixl()
    orders = socket.socket(fileno=handle)
    while True:
        content, ancillary, _, _ = orders.recvmsg(65536, socket.CMSG_SPACE(4))
        if not content:
            return
        child = array.array("i", ancillary[0][2])[0]
        order = json.loads(content)
        if order["backend"] == "dist":
            import kvtransfer.backends.dist  # noqa: F401 - torch takes seconds to load: once for all children
        pid = os.fork()
        if pid == 0:
            orders.close()
            _be_an_end(order, socket.socket(fileno=child))
            os._exit(0)
        os.close(child)
        orders.send(json.dumps(pid).encode())


def _load_nixl() -> None:
    """Loading its libraries takes 0.4 s: once for all children. No context of UCX is made before a child does."""
    api, _ = _load()
    api.nixl_agent("nursery", api.nixl_agent_config(backends=[])).get_plugin_params("UCX")


def _be_an_end(order: Answer, connection: socket.socket) -> None:
    os.environ.update(order["environ"])
    with connection, connection.makefile("rw") as lines:
        end = _End(order)
        _say(lines, peer_to_json(end.side.peer))
        for line in lines:
            command = json.loads(line)
            try:
                answer = getattr(end, "do_" + command.pop("do"))(**command)
            except Exception:
                answer = {"failed": traceback.format_exc()}
            _say(lines, answer)
        end.close()


def _say(lines: Any, answer: Answer) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def grant_from_json(fields: Answer) -> Grant:
    return Grant(
        lease=LeaseRef(lease_id=LeaseId(fields["lease"]["lease_id"]), epoch=fields["lease"]["epoch"]),
        slot=fields["slot"],
        block_ids=tuple(fields["blocks"]),
        first_block=0,
        num_tokens=len(fields["blocks"]),
        digest=DigestKind.WSUM64,
        digests=bytes.fromhex(fields["digests"]),
    )


class _NoPins:
    """Custody switched off: nothing keeps the pool from handing blocks out again."""

    def take_custody(self, blocks: Sequence[int]) -> None: ...

    def end_custody(self, blocks: Sequence[int]) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Fetch:
    transfer: Transfer
    grant: Grant
    local: list[int]
    link: Link
    ended_at: float | None = None


class _End:
    def __init__(self, order: Answer) -> None:
        geometry = KVGeometry(**{**order["geometry"], "order": KVOrder(order["geometry"]["order"])})
        backend = create_backend(order["backend"])
        if ucx_transports() == "tcp":  # emulated reads, which a handshake refuses, are what is to be seen here
            backend.socket_bytes = lambda link: 0  # type: ignore[method-assign]
        self.side = side = Side(backend, order["worker_id"], geometry=geometry)
        side.fill(order["seed"])
        self.pool = BlockPool(geometry.num_blocks)
        side.custody = Custody(self.pool if order["has_custody"] else _NoPins())
        self.thread = side.thread(stall_s=order["stall_s"])
        self.thread.start()
        self.links: dict[str, Link] = {}
        self.fetches: dict[int, _Fetch] = {}
        self.granted: list[int] = []
        self.acted_at: float | None = None

    def close(self) -> None:
        self.thread.stop(1.0)

    # -- as holder ----------------------------------------------------------------------------------------------------

    def do_ping(self) -> Answer:
        return {}

    def do_fill(self, seed: int) -> Answer:
        self.side.fill(seed)
        return {}

    def do_paint(self, value: int) -> Answer:
        """Every byte becomes ``value``."""
        self.side.kv.data[:] = value
        return {}

    def do_seal(self, handoff_id: str, blocks: list[int]) -> Answer:
        _, grant = self.side.seal(handoff_id, blocks)
        lease = {"lease_id": grant.lease.lease_id, "epoch": grant.lease.epoch}
        return {**lease, "slot": grant.slot, "digests": grant.digests.hex()}

    def do_revoke(self, handoff_id: str, reuse: int = 0, after_s: float = 0.0) -> Answer:
        """End a lease and, with ``reuse``, fill its blocks with that byte as their next owner would; after a time on a
        thread of its own."""

        def revoke() -> None:
            time.sleep(after_s)
            ended = self.side.leases.revoke(HandoffId(handoff_id), "revoked", now=0.0)
            if ended is not None and reuse:
                self.side.blocks[list(ended.blocks)] = reuse

        if after_s:
            self.revoking = threading.Thread(target=revoke)
            self.revoking.start()
        else:
            revoke()
        return {}

    def do_revoked(self) -> Answer:
        """Wait for the one that was to come later."""
        self.revoking.join()
        return {}

    def do_flip(self, block: int, byte: int, mask: int) -> Answer:
        self.side.blocks[block, byte] ^= mask
        return {}

    def do_swap(self, one: int, other: int) -> Answer:
        self.side.blocks[[one, other]] = self.side.blocks[[other, one]]
        return {}

    # -- as reader ----------------------------------------------------------------------------------------------------

    def do_connect(self, peer: Answer) -> Answer:
        """Answers with the slug of the error, if any."""
        try:
            self.links[peer["worker_id"]] = self.thread.connect(peer_from_json(peer)).result(LIMIT_S)
        except ServingError as error:
            return {"error": error.slug}
        return {"error": None}

    def do_fetch(self, holder: str, grant: Answer, at: Answer | None = None) -> Answer:
        """``at``: when the byte at ``share`` of the blocks has come, send ``signum`` to ``pid`` (0: this process), or
        with ``do`` "abandon" give the fetch up, or "exit" end this process in an orderly way. Before that, SIGSTOP is
        sent to ``stop``, if given."""
        number = len(self.fetches) + 1
        blocks = grant["blocks"]
        local = sorted(self.pool.allocate(len(blocks)))
        self.side.blocks[local] = 0
        granted = grant_from_json(grant)
        request = FetchRequest(
            transfer_id=number,
            remote_blocks=tuple(blocks),
            local_blocks=tuple(local),
            lease=granted.lease,
            slot=granted.slot,
            deadline_s=LIMIT_S,
        )
        link = self.links[holder]
        fetch = _Fetch(transfer=self.thread.fetch(link, request), grant=granted, local=local, link=link)
        self.fetches[number] = fetch
        fetch.transfer.result.add_done_callback(lambda _: setattr(fetch, "ended_at", time.monotonic()))
        if at is not None:
            threading.Thread(target=self._watch, args=(fetch, at), daemon=True).start()
        return {"number": number}

    def do_read(
        self, peer: Answer, grant: Answer, local: list[int], first_remote_block: int, first_local_block: int
    ) -> Answer:
        """Read from a rank into ``local`` blocks what this rank takes from it, to the end; its geometry may differ."""
        source, mine = (
            peer_from_json(peer),
            Blocks(geometry=self.side.geometry, block_ids=local, first_block=first_local_block),
        )
        granted = grant_from_json(grant)
        request = FetchRequest(
            transfer_id=len(self.fetches) + 1,
            remote_blocks=granted.block_ids,
            local_blocks=tuple(local),
            lease=granted.lease,
            slot=granted.slot,
            first_remote_block=first_remote_block,
            first_local_block=first_local_block,
            deadline_s=LIMIT_S,
        )
        link = self.links[source.worker_id]
        result = self.thread.fetch(link, request).result.result(LIMIT_S)
        total = source.format.num_kv_heads
        heads, held = shared_box(source.geometry, mine.geometry, total).heads, held_box(source.geometry, total).heads
        units = range(first_remote_block, first_remote_block + len(granted.block_ids))
        made = self.side.digester().digest_as(source.geometry, mine, units, num_kv_heads=total, source_heads=heads)
        try:
            check_read(
                granted,
                result.snapshot,
                made,
                num_kv_heads=len(held),
                heads=range(heads.start - held.start, heads.stop - held.start),
            )
        except ServingError as error:
            return {"verdict": error.slug, "detail": error.message}
        return {"verdict": str(result.outcome), "num_bytes": result.num_bytes, "num_copies": result.num_copies}

    def do_allocate(self, num_blocks: int) -> Answer:
        return {"blocks": self.pool.allocate(num_blocks)}

    def do_memory(self) -> Answer:
        """All blocks, as they lie."""
        return {"kv": base64.b64encode(self.side.kv.data.tobytes()).decode()}

    def _watch(self, fetch: _Fetch, at: Answer) -> None:
        """Act when the transfer has come so far, or is over."""
        block = fetch.local[int(at["share"] * len(fetch.local))]
        self.acted_at = None
        while not self.side.blocks[block, :64].any() and not fetch.transfer.quiet.done():
            time.sleep(0)
        self.acted_at = time.monotonic()
        if at.get("stop"):
            os.kill(at["stop"], signal.SIGSTOP)
        if at.get("do") == "abandon":
            fetch.transfer.abandon()
        elif at.get("do") == "exit":
            self.close()
            os._exit(0)
        else:
            os.kill(at["pid"] or os.getpid(), at["signum"])

    def do_posted(self, number: int) -> Answer:
        """Wait until an operation of the fetch is under way."""
        fetch = self.fetches[number]
        until = time.monotonic() + LIMIT_S
        while not fetch.link.num_pending and not fetch.transfer.result.done():
            assert time.monotonic() < until
            time.sleep(0.001)
        return {"is_over": fetch.transfer.result.done()}

    def do_abandon(self, number: int) -> Answer:
        self.fetches[number].transfer.abandon()
        return {}

    def do_result(self, number: int) -> Answer:
        fetch = self.fetches[number]
        result = fetch.transfer.result.result(LIMIT_S)
        wait([fetch.transfer.result], LIMIT_S)
        answer = {"outcome": result.outcome, "verdict": self._verdict(fetch, result), "detail": result.detail}
        if self.acted_at is not None and fetch.ended_at is not None:
            answer["after_act_s"] = fetch.ended_at - self.acted_at
        return answer

    def _verdict(self, fetch: _Fetch, result: FetchResult) -> str:
        """What the decode worker makes of it: "ok" would be published."""
        is_good = result.outcome is HandoffOutcome.OK
        if not is_good and not (result.outcome is HandoffOutcome.PEER_LOST and result.is_data_complete):
            return str(result.outcome)
        try:
            made = self.side.digester().digest(fetch.local)
            heads = self.side.geometry.num_kv_heads
            check_read(fetch.grant, result.snapshot if is_good else None, made, num_kv_heads=heads)
        except ServingError as error:
            return error.slug
        return "ok"

    def do_compare(self, number: int, seed: int) -> Answer:
        """Whether what arrived is, byte for byte, what a memory of ``seed`` holds in the granted blocks."""
        fetch = self.fetches[number]
        size = self.side.kv.data.nbytes
        whole = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).reshape(self.side.blocks.shape)
        return {"is_equal": bool((self.side.blocks[fetch.local] == whole[list(fetch.grant.block_ids)]).all())}

    def do_all_equal(self, number: int, value: int) -> Answer:
        """Whether every byte that arrived is ``value``."""
        return {"is_equal": bool((self.side.blocks[self.fetches[number].local] == value).all())}

    def do_quiet(self, number: int) -> Answer:
        self.fetches[number].transfer.quiet.result(LIMIT_S)
        return {}

    def do_give_back(self, number: int) -> Answer:
        """The sequence is over: its blocks are nobody's, but for custody."""
        self.pool.free(self.fetches[number].local)
        return {}

    def do_regrant(self, value: int) -> Answer:
        """Hand out whatever the pool calls free, and let the new owners write."""
        self.granted = self.pool.allocate(self.pool.counts().free)
        self.side.blocks[self.granted] = value
        return {"num_blocks": len(self.granted)}

    def do_damage(self, value: int) -> Answer:
        """Bytes in handed-out blocks that their owner did not write. The blocks are given back."""
        foreign = int(np.count_nonzero(self.side.blocks[self.granted] != value))
        self.pool.free(self.granted)
        self.granted = []
        return {"num_bytes": foreign}

    def do_stats(self) -> Answer:
        """The pool must be conserved; what is left in it, and the transfer thread's counters."""
        counts, stats, custody = self.pool.counts(), self.thread.stats(), self.side.custody.stats()
        assert counts.is_conserved()
        return {
            "num_free": counts.free,
            "num_custody": counts.custody + custody.num_transfers,
            "num_active": stats.num_active,
            "num_links": stats.num_links,
            "num_retired": stats.num_retired_links,
            "transfers": {str(outcome): count for outcome, count in stats.transfers if count},
            "num_scratch_free": self.side.scratch.num_free,
            "num_leases": self.side.leases.num_live,
        }


if __name__ == "__main__":
    main(int(sys.argv[1]))
