"""Workers of unequal ranks and block sizes, each rank a process with a backend of its own: every byte comes from the
rank that holds it, and the digests of the source say so."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from core.handoff import Grant
from core.kv import KVGeometry, KVOrder, kv_head_range
from kvtransfer.ranks import choose_sources
from tests.support.coordinates import cells, rank_of
from tests.support.transfer_ends import TRANSPORTS, End, Nursery
from tests.support.transfer_side import FORMAT, GEOMETRY

NUM_KV_HEADS = FORMAT.num_kv_heads
NUM_TOKENS = 100
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@dataclass
class Rank:
    end: End
    geometry: KVGeometry
    grant: Grant | None = None


class Group:
    """All ranks of one worker."""

    def __init__(self, nursery: Nursery, transport: str, name: str, shape: KVGeometry, num_ranks: int) -> None:
        seed = 1 if name == "p" else 101
        self.ranks = []
        for rank in range(num_ranks):
            geometry = rank_of(shape, rank, num_ranks, NUM_KV_HEADS)
            end = nursery.start(f"{name}-{num_ranks}-{rank}", transport, geometry=geometry, seed=seed + rank)
            self.ranks.append(Rank(end, geometry))

    def seal(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            rank.grant = rank.end.seal("handoff", blocks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.end.close()


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "ucx-tcp"])
@pytest.mark.parametrize(
    ("num_sources", "num_targets", "source_change", "target_change"),
    [
        (2, 1, {}, {}),
        (1, 2, {}, {}),
        (2, 3, {}, {}),
        (4, 2, {}, {}),
        (1, 1, {}, {"block_size": 32}),
        (2, 3, {"block_size": 32}, {"order": KVOrder.LAYER_BLOCK_SLOT}),
    ],
)
def test_every_rank_gets_its_heads(
    nursery: Nursery,
    transport: str,
    num_sources: int,
    num_targets: int,
    source_change: dict[str, object],
    target_change: dict[str, object],
) -> None:
    source_shape = replace(GEOMETRY, **source_change)  # type: ignore[arg-type]
    target_shape = replace(GEOMETRY, **target_change)  # type: ignore[arg-type]
    sources = Group(nursery, transport, "p", source_shape, num_sources)
    targets = Group(nursery, transport, "d", target_shape, num_targets)
    num_blocks = source_shape.blocks_for(NUM_TOKENS)
    remote = [int(block) for block in np.random.default_rng(1).permutation(GEOMETRY.num_blocks)[:num_blocks]]
    sources.seal(remote)
    num_local = target_shape.blocks_for(num_blocks * source_shape.block_size)
    local = [int(block) for block in np.random.default_rng(2).permutation(GEOMETRY.num_blocks)[:num_local]]
    for target in targets.ranks:
        chosen = choose_sources([source.geometry for source in sources.ranks], target.geometry, NUM_KV_HEADS)
        before = np.frombuffer(target.end.memory(), dtype=np.uint8)
        allocated = target.end.ask("allocate", num_blocks=GEOMETRY.num_blocks)["blocks"]
        assert len(allocated) == GEOMETRY.num_blocks  # custody is of blocks that somebody has
        for index in chosen.read:
            source = sources.ranks[index]
            assert source.grant is not None
            assert target.end.ask("connect", peer=source.end.peer) == {"error": None}
            answer = target.end.read(source.end.peer, source.grant, local)
            assert answer["verdict"] == "ok", answer
        after = np.frombuffer(target.end.memory(), dtype=np.uint8)
        assert (after == _expected(target.geometry, before, local, sources, remote)).all()
    targets.close()
    sources.close()


def _expected(
    geometry: KVGeometry, before: np.ndarray, local: list[int], sources: Group, remote: list[int]
) -> np.ndarray:
    """The memory of a target rank, cell by cell: the tokens of its heads from any rank that holds them."""
    memory = before.copy()
    target = cells(geometry, memory)
    heads = kv_head_range(geometry.rank, geometry.num_ranks, NUM_KV_HEADS)
    copies = {}
    for source in sources.ranks:
        whole = cells(source.geometry, np.frombuffer(source.end.memory(), dtype=np.uint8))
        for head in kv_head_range(source.geometry.rank, source.geometry.num_ranks, NUM_KV_HEADS):
            copies.setdefault(head, []).append((source.geometry, whole))
    for place, head in enumerate(heads):
        holders = copies[head]
        source_geometry, whole = holders[geometry.rank % len(holders)]
        first = kv_head_range(source_geometry.rank, source_geometry.num_ranks, NUM_KV_HEADS).start
        for token in range(len(remote) * source_geometry.block_size):
            source_block, source_slot = divmod(token, source_geometry.block_size)
            block, slot = divmod(token, geometry.block_size)
            target[local[block], place, :, :, slot] = whole[remote[source_block], head - first, :, :, source_slot]
    return memory


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "ucx-tcp"])
def test_a_flipped_byte_of_one_rank_is_found_by_the_rank_that_reads_it(nursery: Nursery, transport: str) -> None:
    sources = Group(nursery, transport, "p", GEOMETRY, 1)
    targets = Group(nursery, transport, "d", GEOMETRY, 2)  # heads 0 and 1..2
    sources.seal([4, 9])
    holder = sources.ranks[0]
    assert holder.grant is not None
    holder.end.ask("flip", block=9, byte=GEOMETRY.head_bytes + 3, mask=1)  # of head 1
    verdicts = []
    for target in targets.ranks:
        local = target.end.ask("allocate", num_blocks=2)["blocks"]
        assert target.end.ask("connect", peer=holder.end.peer) == {"error": None}
        verdicts.append(target.end.read(holder.end.peer, holder.grant, local)["verdict"])
    assert verdicts == ["ok", "digest_mismatch"]
    targets.close()
    sources.close()
