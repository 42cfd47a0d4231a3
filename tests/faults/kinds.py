"""Every kind of fault that the injector knows, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from core import types as t
from core.handoff import Open, Ready, Release, Sealed
from kvtransfer.memory import REGION_CANARY, REGION_SLOTS
from tests.faults.faults_of_control import Forged, Message
from tests.faults.faults_of_data import Mangled, Operation, SourceReused
from tests.faults.faults_of_processes import ClientGone, GatewayFault, ProcessFault, SecondClaim, WriterGoesOn
from tests.faults.injected import Injected

if TYPE_CHECKING:
    from tests.faults.case import Case

Maker = Callable[[str, "Case", random.Random], Injected]

KINDS: dict[str, Maker] = {
    "bit flipped": lambda *a: Mangled(*a, Mangled.flip),
    "bits flipped": lambda *a: Mangled(*a, Mangled.flip_many),
    "blocks reordered": lambda *a: Mangled(*a, Mangled.swap_blocks),
    "heads reordered": lambda *a: Mangled(*a, Mangled.swap_heads),
    "words reordered": lambda *a: Mangled(*a, Mangled.swap_words),
    "stale block": lambda *a: Mangled(*a, Mangled.other_block),
    "bytes lost": lambda *a: Mangled(*a, Mangled.zeros),
    "read cut short": lambda *a: Mangled(*a, Mangled.cut_short),
    "slot bits flipped": lambda *a: Mangled(*a, Mangled.flip_many, REGION_SLOTS),
    "canary changed": lambda *a: Mangled(*a, Mangled.flip_many, REGION_CANARY),
    "source reused before": lambda *a: SourceReused(*a, "before"),
    "torn read": lambda *a: SourceReused(*a, "between"),
    "source reused after": lambda *a: SourceReused(*a, "after"),
    "operation fails": lambda *a: Operation(*a, "fails"),
    "operation slow": lambda *a: Operation(*a, "slow"),
    "operation hangs": lambda *a: Operation(*a, "hangs"),
    "late write": lambda *a: Operation(*a, "given up"),
    "message lost": lambda *a: Message(*a, "lost"),
    "message twice": lambda *a: Message(*a, "twice"),
    "message late": lambda *a: Message(*a, "late"),
    "stream breaks": lambda *a: Message(*a, "breaks"),
    "digests forged": lambda *a: Forged(*a, Forged.digests, Sealed),
    "blocks forged": lambda *a: Forged(*a, Forged.blocks, Sealed),
    "grant forged": lambda *a: Forged(*a, Forged.grant, Sealed),
    "ready forged": lambda *a: Forged(*a, Forged.ready, Ready),
    "release forged": lambda *a: Forged(*a, Forged.release, Release),
    "open forged": lambda *a: Forged(*a, Forged.open, Open),
    "prefill dies": lambda *a: ProcessFault(*a, t.Role.PREFILL, "dies"),
    "prefill returns": lambda *a: ProcessFault(*a, t.Role.PREFILL, "returns"),
    "prefill stops": lambda *a: ProcessFault(*a, t.Role.PREFILL, "stops"),
    "prefill hangs": lambda *a: ProcessFault(*a, t.Role.PREFILL, "hangs"),
    "prefill twice": lambda *a: ProcessFault(*a, t.Role.PREFILL, "twice"),
    "decode dies": lambda *a: ProcessFault(*a, t.Role.DECODE, "dies"),
    "decode returns": lambda *a: ProcessFault(*a, t.Role.DECODE, "returns"),
    "decode stops": lambda *a: ProcessFault(*a, t.Role.DECODE, "stops"),
    "decode hangs": lambda *a: ProcessFault(*a, t.Role.DECODE, "hangs"),
    "decode twice": lambda *a: ProcessFault(*a, t.Role.DECODE, "twice"),
    "gateway dies": lambda *a: GatewayFault(*a, "dies"),
    "gateway hangs": lambda *a: GatewayFault(*a, "hangs"),
    "client gone": ClientGone,
    "second claim": SecondClaim,
    "writer goes on": WriterGoesOn,
}

NEEDS_DIGESTS = frozenset(
    kind
    for kind in KINDS
    if kind.endswith(("flipped", "reordered", "forged")) or kind in ("stale block", "bytes lost", "read cut short")
) - {"slot bits flipped", "grant forged", "ready forged", "release forged", "open forged"}
"""What only digests can see: without them these are not injected."""
