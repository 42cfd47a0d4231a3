"""Three hundred seeded faults, each met by a transfer between two real processes: none passes unseen, none leaks, none
sticks. What would be published is compared with what was sealed, byte for byte.

Faults of the memory and of the lease happen to the holder, once the grant is made; the others happen at a byte of the
transfer. A tenth of the transfers meets no fault: those must succeed.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from core.handoff import Grant
from core.kv import KVGeometry
from tests.support.transfer_ends import TRANSPORTS, Answer, End, Nursery

GEOMETRY = KVGeometry(num_blocks=64, block_size=16, num_layers=8, num_kv_heads=3, head_dim=64, dtype_bytes=4)
"""13 MB."""
NUM_FAULTS = 300
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


class Pair:
    """A holder with the content of a seed, and a reader. Both are replaced when they die."""

    def __init__(self, nursery: Nursery, transport: str, choose: random.Random) -> None:
        self.nursery = nursery
        self.transport = transport
        self.choose = choose
        self.num_starts = self.num_leases = 0
        self.start_reader()
        self.start_holder()

    def start_reader(self) -> None:
        self.reader = self._start("D")

    def start_holder(self) -> None:
        self.num_starts += 1
        self.seed = self.num_starts
        self.holder = self._start("P")
        self.connect()

    def connect(self) -> None:
        assert self.reader.ask("connect", peer=self.holder.peer) == {"error": None}

    def _start(self, worker_id: str) -> End:
        return self.nursery.start(worker_id, self.transport, geometry=GEOMETRY, seed=self.num_starts)

    def seal(self) -> Grant:
        """A lease over some of the blocks, in some order."""
        self.num_leases += 1
        blocks = self.choose.sample(range(GEOMETRY.num_blocks), self.choose.randint(8, GEOMETRY.num_blocks))
        if self.choose.random() < 0.5:
            blocks.sort()
        return self.holder.seal(self.handoff_id, blocks)

    @property
    def handoff_id(self) -> str:
        return f"h{self.num_leases}"

    def fetch(self, grant: Grant, at: Answer | None = None) -> Answer:
        """To the end; checks what every fetch must hold. Returns the result."""
        return self.end(self.reader.fetch(self.holder.peer, grant, at=at))

    def end(self, number: int) -> Answer:
        result = self.reader.result(number)
        self.reader.ask("quiet", number=number)
        if result["verdict"] == "ok":
            assert self.reader.ask("compare", number=number, seed=self.seed)["is_equal"], "wrong bytes, undetected"
        self.reader.ask("give_back", number=number)
        stats = self.reader.ask("stats")
        assert stats["num_custody"] == stats["num_active"] == 0, stats
        assert stats["num_free"] == GEOMETRY.num_blocks and stats["num_scratch_free"] == 8, stats
        return result

    # -- faults: each returns the verdict that it must be met with, or "" when timing decides --------------------------

    def nothing(self) -> tuple[Answer, str]:
        return self.fetch(self.seal()), "ok"

    def bit_flipped(self) -> tuple[Answer, str]:
        grant = self.seal()
        flip = {"byte": self.choose.randrange(GEOMETRY.block_bytes), "mask": 1 << self.choose.randrange(8)}
        block = self.choose.choice(grant.block_ids)
        self.holder.ask("flip", block=block, **flip)
        result = self.fetch(grant)
        self.holder.ask("flip", block=block, **flip)
        return result, "digest_mismatch"

    def bits_flipped(self) -> tuple[Answer, str]:
        grant = self.seal()
        flips = [
            {
                "block": self.choose.choice(grant.block_ids),
                "byte": self.choose.randrange(GEOMETRY.block_bytes),
                "mask": self.choose.randrange(1, 256),
            }
            for _ in range(self.choose.randint(2, 20))
        ]
        for flip in flips:
            self.holder.ask("flip", **flip)
        result = self.fetch(grant)
        for flip in flips:
            self.holder.ask("flip", **flip)
        return result, "digest_mismatch"

    def blocks_swapped(self) -> tuple[Answer, str]:
        grant = self.seal()
        one, other = self.choose.sample(grant.block_ids, 2)
        self.holder.ask("swap", one=one, other=other)
        result = self.fetch(grant)
        self.holder.ask("swap", one=one, other=other)
        return result, "digest_mismatch"

    def lease_ended(self) -> tuple[Answer, str]:
        grant = self.seal()
        self.holder.ask("revoke", handoff_id=self.handoff_id)
        return self.fetch(grant), "stale_lease"

    def blocks_reused(self) -> tuple[Answer, str]:
        """By another hand-off, which has the slot and an equally long lease."""
        grant = self.seal()
        self.holder.ask("revoke", handoff_id=self.handoff_id, reuse=7)
        self.num_leases += 1
        self.holder.seal(self.handoff_id, list(grant.block_ids))
        result = self.fetch(grant)
        self.holder.ask("revoke", handoff_id=self.handoff_id)
        self.holder.ask("fill", seed=self.seed)
        return result, "stale_lease"

    def torn(self) -> tuple[Answer, str]:
        grant = self.seal()
        after_s = self.choose.uniform(1e-6, 0.01)
        self.holder.ask("revoke", handoff_id=self.handoff_id, reuse=9, after_s=after_s)
        number = self.reader.fetch(self.holder.peer, grant)
        result = self.reader.result(number)
        self.holder.ask("revoked")
        self.holder.ask("fill", seed=self.seed)
        self.end(number)
        return result, ""

    def killed(self) -> tuple[Answer, str]:
        act = {"share": self.choose.random(), "pid": self.holder.pid, "signum": signal.SIGKILL}
        result = self.fetch(self.seal(), at=act)
        self.holder.wait_gone()
        self.start_holder()
        return result, ""

    def stopped(self) -> tuple[Answer, str]:
        """And continued, when the reader has seen the pause or got past it."""
        grant = self.seal()
        act = {"share": self.choose.random(), "pid": self.holder.pid, "signum": signal.SIGSTOP}
        number = self.reader.fetch(self.holder.peer, grant, at=act)
        self.holder.wait_stopped()
        self.holder.resume()
        return self.end(number), "ok"

    def abandoned(self) -> tuple[Answer, str]:
        result = self.fetch(self.seal(), at={"share": self.choose.random(), "do": "abandon"})
        assert result["outcome"] in ("aborted", "ok")
        return result, ""

    def abandoned_while_stopped(self) -> tuple[Answer, str]:
        grant = self.seal()
        self.holder.stop()
        number = self.reader.fetch(self.holder.peer, grant)
        self.reader.ask("posted", number=number)
        self.reader.ask("abandon", number=number)
        self.reader.result(number)
        self.holder.resume()
        return self.end(number), ""

    def reader_killed(self) -> tuple[Answer, str]:
        grant = self.seal()
        self.reader.tell_fetch(
            self.holder.peer, grant, at={"share": self.choose.random(), "pid": 0, "signum": signal.SIGKILL}
        )
        self.reader.wait_gone()
        self.start_reader()
        self.connect()
        return self.fetch(grant), "ok"


EXPECTED = {"", "ok", "digest_mismatch", "stale_lease", "peer_lost", "aborted"}


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_every_fault_is_seen_or_does_no_harm(nursery: Nursery, transport: str) -> None:
    pair = Pair(nursery, transport, random.Random(f"faults over {transport}"))
    kinds = [
        pair.nothing,
        pair.bit_flipped,
        pair.bits_flipped,
        pair.blocks_swapped,
        pair.lease_ended,
        pair.blocks_reused,
        pair.torn,
        pair.killed,
        pair.stopped,
        pair.abandoned,
        pair.abandoned_while_stopped,
    ]
    if not TRANSPORTS[transport].owner_can_die:
        kinds.append(pair.reader_killed)
    num_faults = NUM_FAULTS // len(TRANSPORTS)
    schedule = [kinds[number % len(kinds)] for number in range(num_faults)]
    pair.choose.shuffle(schedule)
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for fault in schedule:
        result, verdict = fault()
        counts[f"{fault.__name__} -> {result['verdict']}"] += 1
        assert result["verdict"] in EXPECTED, result
        assert not verdict or result["verdict"] == verdict, (fault.__name__, result)
        pair.holder.ask("revoke", handoff_id=pair.handoff_id)
        assert pair.holder.ask("stats")["num_leases"] == 0
    print(f"{transport}: {num_faults} faults in {time.monotonic() - began:.1f} s, none undetected, leaked or stuck")
    for kind, count in sorted(counts.items()):
        print(f"  {kind}: {count}")
