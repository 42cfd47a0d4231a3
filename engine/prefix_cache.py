"""What blocks hold: the index from block hashes to blocks, and the order in which kept blocks are given up.

A block has *content* from the moment its tokens are complete and computed (or verified after a transfer) until it is
evicted. While somebody holds the block its content can be shared; when nobody does, the block is *kept* until room is
needed: least recently held first, and of one sequence the last block before the first, because a block is of no use
without those before it.

Torch-free and not thread-safe: it lives inside :class:`engine.block_pool.BlockPool`, under the pool's lock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from core.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """What a reader of the index has to add and to remove to be up to date. No hash is in both."""

    stored: tuple[BlockHash, ...] = ()
    evicted: tuple[BlockHash, ...] = ()


class PrefixCache:
    """One block for each hash; the first one stored wins."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        self._kept: dict[int, None] = {}  # dicts keep the order of insertion: the first is the next to go
        self._stored: dict[BlockHash, None] = {}
        self._evicted: dict[BlockHash, None] = {}

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds: they can be had by eviction."""
        return len(self._kept)

    def find(self, hashes: Iterable[BlockHash], limit: int) -> list[int]:
        """The blocks of the longest run of ``hashes`` from the first on, at most ``limit``."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None or len(found) == limit:
                break
            found.append(block)
        return found

    def has_content(self, block: int) -> bool:
        return block in self._hashes

    def store(self, block: int, block_hash: BlockHash) -> None:
        """The block holds what ``block_hash`` names. Nothing happens when another block does already."""
        if block in self._hashes:
            assert self._hashes[block] == block_hash, f"block {block} was overwritten while its content was shared"
        elif block_hash not in self._blocks:
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash
            if block_hash in self._evicted:
                del self._evicted[block_hash]  # the reader still believes it is here
            else:
                self._stored[block_hash] = None
        # else: two sequences computed the same at once; the second block stays without content

    def keep(self, block: int) -> bool:
        """Nobody holds the block any more. False when it has no content: it is just free."""
        if block not in self._hashes:
            return False
        self._kept[block] = None
        return True

    def take(self, block: int) -> None:
        """A kept block is held again."""
        del self._kept[block]

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def evict(self) -> int:
        """Give up the content of the first kept block; the block is the caller's."""
        block = next(iter(self._kept))
        del self._kept[block]
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Whatever the block holds is not to be used any more. Legal for any block that is not kept."""
        block_hash = self._hashes.pop(block, None)
        if block_hash is not None:
            del self._blocks[block_hash]
            if block_hash in self._stored:
                del self._stored[block_hash]  # never reported: nobody has to forget it
            else:
                self._evicted[block_hash] = None

    def take_changes(self, *, whole: bool) -> CacheChanges:
        """Changes since the last call; with ``whole``, everything there is, for a reader that knows nothing yet."""
        stored = self._blocks if whole else self._stored
        evicted = () if whole else tuple(self._evicted)
        changes = CacheChanges(stored=tuple(stored), evicted=evicted)
        self._stored, self._evicted = {}, {}
        return changes
