"""Each defence is needed: without it the injector reports damage, of the kind that the defence is there for.

The product has no switch for this; the tests take a defence out by patching it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import kvtransfer.session
import kvtransfer.validate
from core.ids import LeaseId
from engine.block_pool import BlockPool
from kvtransfer.lease import LeaseTable, Reader, Verdict
from kvtransfer.peers import Peers
from kvtransfer.slot import LeaseState, SlotView, parse_slot
from tests.faults.inject import run_cases

Patch = Callable[[pytest.MonkeyPatch], None]


def no_custody(patch: pytest.MonkeyPatch) -> None:
    """Blocks under transfer go back to the pool with their request."""
    patch.setattr(BlockPool, "take_custody", lambda self, blocks: None)
    patch.setattr(BlockPool, "end_custody", lambda self, blocks: None)


def no_slot_validation(patch: pytest.MonkeyPatch) -> None:
    """The slot is read, and whatever it says is believed to be the grant."""

    def believe(expected: Any, snapshot: bytes) -> SlotView:
        view = parse_slot(snapshot)
        return SlotView(lease=expected, state=LeaseState.SEALED, blocks_ready=1 << 20, digest=view.digest)

    patch.setattr(kvtransfer.session, "check_slot", believe)
    patch.setattr(kvtransfer.validate, "check_slot", believe)


def no_digests(patch: pytest.MonkeyPatch) -> None:
    """Digests travel, and are not compared."""
    patch.setattr(kvtransfer.validate.digest, "verify", lambda expected, actual, *, num_kv_heads: None)


def no_incarnations(patch: pytest.MonkeyPatch) -> None:
    """A link to any start of a worker will do."""
    patch.setattr(Peers, "find", lambda self, peer: self._links.get(peer.worker_id))


def no_claims(patch: pytest.MonkeyPatch) -> None:
    """Whoever says Release, ends the lease."""
    release = LeaseTable.release

    def believe(self: LeaseTable, ref: Any, reader: Reader, **rest: Any) -> tuple[Verdict, Any]:
        lease = self._leases.get(LeaseId(ref.lease_id))
        return release(self, ref, reader if lease is None or lease.reader is None else lease.reader, **rest)

    patch.setattr(LeaseTable, "release", believe)


def no_tail_copy(patch: pytest.MonkeyPatch) -> None:
    """Who continues a sequence writes on in its tail, whoever else sees it."""
    patch.setattr(BlockPool, "is_writable", lambda self, block: True)


def no_renewals(patch: pytest.MonkeyPatch) -> None:
    """Who still reads a lease cannot keep it."""
    patch.setattr(LeaseTable, "renew", lambda self, ref, incarnation, *, now: Verdict.APPLIED)


@dataclass(frozen=True, kw_only=True)
class Defence:
    take_out: Patch
    damage: str
    """What only this defence prevents."""
    in_its_wake: frozenset[str] = frozenset()
    """What else may be seen then, and nothing besides."""
    faults: tuple[str, ...]
    """What brings it about."""


DEFENCES = {
    "custody": Defence(
        take_out=no_custody,
        damage="late write",
        in_its_wake=frozenset({"wrong content"}),
        faults=("late write", "operation hangs", "operation slow", "client gone"),
    ),
    "slot validation": Defence(
        take_out=no_slot_validation,
        damage="wrong content",  # where digests are off; where they are on, they are what is left
        in_its_wake=frozenset({"false alarm"}),
        faults=("torn read", "source reused before"),
    ),
    "digests": Defence(
        take_out=no_digests,
        damage="wrong content",
        faults=("bit flipped", "bits flipped", "blocks reordered", "heads reordered", "stale block"),
    ),
    "incarnations": Defence(
        take_out=no_incarnations,
        damage="old incarnation",
        in_its_wake=frozenset({"lost", "false alarm", "wrong content"}),
        faults=("prefill twice", "prefill returns"),
    ),
    "claims": Defence(take_out=no_claims, damage="wrongly ended", faults=("second claim", "operation slow")),
    "renewals": Defence(
        take_out=no_renewals, damage="served lease ended", faults=("operation slow", "operation hangs")
    ),
    "tail copy": Defence(
        take_out=no_tail_copy,
        damage="leased block written",
        in_its_wake=frozenset({"false alarm"}),
        faults=("writer goes on",),
    ),
}
SEEDS = [range(first, first + 60) for first in range(20_000, 20_600, 60)]
"""Lots of cases: as many are played as it takes to see the damage, which some defences prevent in few of them."""


@pytest.mark.parametrize("name", DEFENCES)
def test_without_a_defence_there_is_damage_of_its_kind_and_with_it_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defence = DEFENCES[name]
    for seeds in SEEDS:
        whole = run_cases(seeds, defence.faults)
        assert not whole.damage, whole.table()
        with monkeypatch.context() as patch:
            defence.take_out(patch)
            broken = run_cases(seeds, defence.faults)
        if broken.damage[defence.damage]:
            break
    assert broken.damage[defence.damage] > 0, broken.table()
    assert set(broken.damage) <= {defence.damage, *defence.in_its_wake}, broken.table()
