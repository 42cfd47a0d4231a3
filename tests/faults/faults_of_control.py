"""What goes wrong with control messages: lost, doubled, late, on a broken stream, or saying something else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.virtual.network import Pipe
from core.handoff import (
    AbortHandoff,
    Claim,
    Ended,
    LeaseRef,
    Open,
    Ready,
    Refused,
    Release,
    Renew,
    Sealed,
    Welcome,
)
from core.ids import LeaseId
from tests.faults.injected import Injected

if TYPE_CHECKING:
    from tests.faults.case import Case


class Message(Injected):
    """A control message is lost, comes twice, late, or before its predecessors; or the stream ends."""

    def __init__(self, kind: str, case: Case, rng: random.Random, what: str) -> None:
        super().__init__(kind, case, rng)
        self._what = what
        self._types = rng.choice(
            (
                (Open,),
                (Claim,),
                (Ready,),
                (Sealed,),
                (Release,),
                (Renew, AbortHandoff, Release),
                (Ended, Refused, Sealed),
                (Welcome,),
                (object,),
            )
        )

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if not isinstance(message, self._types) or not self._is_due():
            return None
        self.handoff = getattr(message, "handoff_id", None)
        self.case.audit.renewals_were_disturbed |= isinstance(message, Renew) or self._what == "breaks"
        late = self.rng.choice((0.001, 0.01, 0.3, 2.0, 5.0))
        match self._what:
            case "lost":
                return []
            case "twice":
                return [(message, 0.0), (message, self.rng.choice((0.0, late)))]
            case "late":
                return [(message, late)]
            case _:
                ends = (pipe.sender, pipe.receiver)
                self._soon(lambda: self.case.cluster.network.break_streams(ends))
                return None


class Forged(Injected):
    """A control message arrives that says something else."""

    first_hits = 2

    def __init__(self, kind: str, case: Case, rng: random.Random, change: Callable[..., Any], of: type) -> None:
        super().__init__(kind, case, rng)
        self._change, self._of = change, of

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if not isinstance(message, self._of) or not self._is_due():
            return None
        forged = self._change(self, message)
        self.handoff = getattr(message, "handoff_id", None)
        self.took_effect = forged != message
        self.case.audit.data_was_changed = True
        return [(forged, 0.0)]

    def digests(self, sealed: Sealed) -> Sealed:
        digests = bytearray(sealed.grant.digests)
        if digests:
            digests[self.rng.randrange(len(digests))] ^= 1 << self.rng.randrange(8)
        return replace(sealed, grant=replace(sealed.grant, digests=bytes(digests)))

    def blocks(self, sealed: Sealed) -> Sealed:
        blocks = list(sealed.grant.block_ids)
        self.rng.shuffle(blocks)
        if blocks and self.rng.random() < 0.5:
            blocks[0] = self.rng.choice((0, 1, blocks[0] + 1, 10**6, -1))
        return replace(sealed, grant=replace(sealed.grant, block_ids=tuple(blocks)))

    def grant(self, sealed: Sealed) -> Sealed:
        grant = sealed.grant
        change = self.rng.choice(
            (
                {"slot": self.rng.choice((grant.slot + 1, 0, 10**6))},
                {"lease": LeaseRef(lease_id=grant.lease.lease_id, epoch=grant.lease.epoch + self.rng.choice((-1, 1)))},
                {"lease": LeaseRef(lease_id=LeaseId(grant.lease.lease_id + 1), epoch=grant.lease.epoch)},
                {"num_tokens": grant.num_tokens + 1},
                {"first_block": grant.first_block + 1},
                {"block_ids": grant.block_ids[:-1]},
            )
        )
        return replace(sealed, grant=replace(grant, **change))

    def release(self, release: Release) -> Release:
        lease = release.lease
        change = self.rng.choice(
            (
                {"lease": LeaseRef(lease_id=lease.lease_id, epoch=lease.epoch - 1)},
                {"lease": LeaseRef(lease_id=LeaseId(lease.lease_id + 1), epoch=lease.epoch)},
                {"attempt": release.attempt + 1},
            )
        )
        return replace(release, **change)

    def ready(self, ready: Ready) -> Ready:
        blocks = list(ready.block_ids)
        self.rng.shuffle(blocks)
        change = self.rng.choice(
            (
                {"block_ids": tuple(blocks)},
                {"block_ids": (*blocks[:-1], self.rng.choice((0, 10**6)))},
                {"first_block": ready.first_block + 1},
                {"lease": LeaseRef(lease_id=ready.lease.lease_id, epoch=ready.lease.epoch - 1)},
                {"slot": ready.slot + 1},
            )
        )
        return replace(ready, **change)

    def open(self, opened: Open) -> Open:
        return replace(opened, num_held_blocks=self.rng.choice((1, 3, 10**6)))
