"""A prefill worker's memory in a process of its own: ``python -m tests.support.transfer_peer WORKER_ID SEED
GEOMETRY BACKEND``.

Lines of JSON: it says how it is reached, then answers commands on standard input until that closes.
"""

import base64
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from core.handoff import DigestKind, Grant, LeaseRef, LinkInfo, PeerInfo, TransferMode
from core.ids import HandoffId, Incarnation, LeaseId, WorkerId
from core.kv import KVFormat, KVGeometry, KVOrder
from kvtransfer.backends import create_backend
from tests.support.transfer_side import GEOMETRY, Side


def peer_to_json(peer: PeerInfo) -> dict[str, Any]:
    fields = asdict(peer)
    for link in (fields["link"], *fields["other_links"]):
        link["metadata"] = base64.b64encode(link["metadata"]).decode()
    fields["canary_digest"] = peer.canary_digest.hex()
    return fields


def peer_from_json(fields: dict[str, Any]) -> PeerInfo:
    return PeerInfo(
        worker_id=WorkerId(fields["worker_id"]),
        incarnation=Incarnation(fields["incarnation"]),
        format=KVFormat(**fields["format"]),
        geometry=geometry_from_json(fields["geometry"]),
        link=_link_from_json(fields["link"]),
        other_links=tuple(map(_link_from_json, fields["other_links"])),
        canary_digest=bytes.fromhex(fields["canary_digest"]),
    )


def _link_from_json(fields: dict[str, Any]) -> LinkInfo:
    regions = tuple((name, address, num_bytes) for name, address, num_bytes in fields["regions"])
    metadata = base64.b64decode(fields["metadata"])
    return LinkInfo(**{**fields, "metadata": metadata, "mode": TransferMode(fields["mode"]), "regions": regions})


def geometry_from_json(fields: dict[str, Any]) -> KVGeometry:
    return KVGeometry(**{**fields, "order": KVOrder(fields["order"])})


class PeerProcess:
    """Starts the program and talks to it."""

    def __init__(
        self,
        worker_id: str,
        *,
        seed: int = 1,
        geometry: KVGeometry = GEOMETRY,
        backend: str = "nixl",
        fallback: str = "none",
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.support.transfer_peer",
            worker_id,
            str(seed),
            json.dumps(asdict(geometry)),
            backend,
            fallback,
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peer = peer_from_json(self._answer())

    def seal(self, handoff_id: str, blocks: list[int]) -> Grant:
        """Open and seal a lease over these blocks."""
        fields = self.ask({"do": "seal", "handoff_id": handoff_id, "blocks": blocks})
        return Grant(
            lease=LeaseRef(lease_id=LeaseId(fields["lease_id"]), epoch=fields["epoch"]),
            slot=fields["slot"],
            block_ids=tuple(blocks),
            first_block=0,
            num_tokens=len(blocks),
            digest=DigestKind.WSUM64,
            digests=bytes.fromhex(fields["digests"]),
        )

    def revoke(self, handoff_id: str) -> None:
        self.ask({"do": "revoke", "handoff_id": handoff_id})

    def flip(self, block: int, byte: int) -> None:
        """Change one byte of a block after its digests were made."""
        self.ask({"do": "flip", "block": block, "byte": byte})

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("{"), f"the peer process said {line!r}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(worker_id: str, seed: int, geometry: KVGeometry, backend: str, fallback: str) -> None:
    other = None if fallback == "none" else create_backend(fallback)
    side = Side(create_backend(backend), worker_id, geometry=geometry, fallback=other)
    side.fill(seed)
    _say(peer_to_json(side.peer))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "seal":
            _, grant = side.seal(command["handoff_id"], command["blocks"])
            _say(
                {
                    "lease_id": grant.lease.lease_id,
                    "epoch": grant.lease.epoch,
                    "slot": grant.slot,
                    "digests": grant.digests.hex(),
                }
            )
        elif command["do"] == "revoke":
            side.leases.revoke(HandoffId(command["handoff_id"]), "revoked", now=0.0)
            _say({})
        else:
            side.blocks[command["block"], command["byte"]] ^= 1
            _say({})
    side.backend.close()


def _say(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), geometry_from_json(json.loads(sys.argv[3])), *sys.argv[4:])
