"""How the block table of a sequence grows, shares and shrinks: between :mod:`engine.scheduler`, which decides who gets
blocks, and :mod:`engine.block_pool`, which counts them.

* A sequence that starts with nothing computed takes the longest run of its prompt that the prefix cache holds. At
  least its last token is always computed: the next one is drawn from it.
* Complete blocks are published as soon as they are computed.
* Copy on write: a block is written to by one sequence only. One that continues in a block which others see too (a
  fork's tail) gets a copy of its own when it next computes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from core.errors import OutOfBlocks
from core.ids import BlockHash
from core.kv import hash_blocks
from engine.block_pool import BlockPool, Reservation
from engine.sequence import Sequence as EngineSequence

CopyBlock = Callable[[int, int, int], None]
"""``copy(source, target, num_slots)``: the first ``num_slots`` tokens of a block; the rest of the target is cleared."""
Settle = Callable[[EngineSequence], None]
"""Returns when nothing writes to the blocks of a sequence any more."""


def _nothing(sequence: EngineSequence) -> None:
    """Where no step is under way between two calls."""


class BlockTables:
    """Not thread-safe: it belongs to the step thread, like the sequences."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        copy_block: CopyBlock,
        is_caching: bool,
        settle: Settle = _nothing,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._copy_block = copy_block
        self._is_caching = is_caching
        self._settle = settle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def never_fits(self, sequence: EngineSequence) -> OutOfBlocks | None:
        """The error of a sequence that even the empty pool could not hold."""
        needed = self.blocks_for(len(sequence.tokens))
        if needed <= self._pool.num_blocks:
            return None
        return OutOfBlocks(
            f"{len(sequence.tokens)} tokens need {needed} KV blocks of {self._block_size} tokens, "
            f"this worker has {self._pool.num_blocks}; raise models[].kv.num_blocks or memory_bytes"
        )

    def num_growth(self, sequence: EngineSequence, num_tokens: int) -> int:
        """Blocks that it may want, and was not promised, beyond those of its present tokens: for ``num_tokens`` more
        tokens, at most to its end."""
        num_present = max(self.blocks_for(len(sequence.tokens)), len(sequence.block_table))
        projected = self.blocks_for(min(sequence.num_final_tokens, len(sequence.tokens) + num_tokens))
        promised = sequence.reservation.remaining if sequence.reservation is not None else 0
        promised_for_growth = max(0, promised - (num_present - len(sequence.block_table)))
        return max(0, projected - num_present - promised_for_growth)

    def num_missing(self, sequence: EngineSequence) -> int:
        """Blocks that :meth:`extend` gets for all tokens that the sequence has; one of them for a copy, perhaps."""
        missing = max(0, self.blocks_for(len(sequence.tokens)) - len(sequence.block_table))
        return missing + (self._shared_tail(sequence) is not None)

    def num_to_take(self, sequence: EngineSequence) -> int:
        """How many of those somebody must give up: hits in the hands of others cost nothing."""
        return self._pool.count_missing(self.num_missing(sequence), self._shareable(sequence))

    def extend(self, sequence: EngineSequence, claim: Reservation | None = None) -> None:
        """Get what is missing. Raises OutOfBlocks and changes nothing when it is not to be had."""
        blocks, num_hits = self._pool.allocate_shared(
            self.num_missing(sequence), self._shareable(sequence), sequence.reservation, claim
        )
        if num_hits:
            sequence.num_computed = num_hits * self._block_size
            sequence.num_published = num_hits
            if sequence.num_tokens_computed == 0:
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
        tail = self._shared_tail(sequence)
        if tail is not None:
            shared, own = sequence.block_table[tail], blocks.pop()
            self._copy_block(shared, own, sequence.num_computed % self._block_size)
            sequence.block_table[tail] = own
            sequence.num_published = min(sequence.num_published, tail)
            self._pool.free([shared])
        elif sequence.has_foreign_tail and sequence.num_computed % self._block_size:
            own = sequence.block_table[sequence.num_computed // self._block_size]
            self._copy_block(own, own, sequence.num_computed % self._block_size)
        sequence.has_foreign_tail = False
        sequence.block_table += blocks

    def make_room(self, sequence: EngineSequence) -> None:
        """A block for one token more than it has, where it may have one and nobody has to give one up."""
        num_tokens = len(sequence.tokens) + 1
        if num_tokens <= sequence.num_final_tokens and self.blocks_for(num_tokens) > len(sequence.block_table):
            with suppress(OutOfBlocks):
                blocks, _ = self._pool.allocate_shared(1, (), sequence.reservation, None)
                sequence.block_table += blocks

    def publish(self, sequence: EngineSequence) -> None:
        """Let others share the complete blocks."""
        num_complete = sequence.num_computed // self._block_size
        if num_complete > sequence.num_published and self._is_caching and not sequence.has_unverified_kv:
            hashes = self._hashes(sequence, num_complete)
            fresh = slice(sequence.num_published, num_complete)
            self._pool.publish(sequence.block_table[fresh], hashes[fresh])
            sequence.num_published = num_complete

    def lease_complete(self, sequence: EngineSequence) -> list[int]:
        """Lease its complete blocks that are not leased yet; returns them."""
        num_complete = sequence.num_computed // self._block_size
        fresh = sequence.block_table[sequence.num_leased : num_complete]
        self._pool.lease(fresh)
        sequence.num_leased = max(sequence.num_leased, num_complete)
        return fresh

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Give ``child`` the blocks of the ``num_computed`` tokens that it says it has in common with ``parent``."""
        num_common = child.num_computed
        assert not child.block_table and num_common <= parent.num_computed, "there is nothing to fork from"
        assert child.tokens[:num_common] == parent.tokens[:num_common], "a fork begins like its parent"
        assert child.salt == parent.salt, "blocks are shared within a tenant"
        blocks = parent.block_table[: self.blocks_for(num_common)]
        self._pool.share(blocks)
        child.block_table = blocks
        child.has_foreign_tail = True
        child.has_unverified_kv = parent.has_unverified_kv

    def give_back(self, sequence: EngineSequence, *, is_broken: bool = False) -> None:
        """All blocks and promises. ``is_broken``: what the blocks hold is not to be used by anybody."""
        self._settle(sequence)
        if is_broken:
            self._pool.forget(sequence.block_table)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_published = sequence.num_leased = 0
        sequence.has_unverified_kv = sequence.has_foreign_tail = False
        if sequence.reservation is not None:
            sequence.reservation.release()

    def _shared_tail(self, sequence: EngineSequence) -> int | None:
        """The place in the table of the block that is written next, if others see it."""
        tail, num_slots = divmod(sequence.num_computed, self._block_size)
        if num_slots == 0 or self._pool.is_writable(sequence.block_table[tail]):
            return None
        return tail

    def _shareable(self, sequence: EngineSequence) -> Sequence[BlockHash]:
        """Hashes of the blocks that it may take from the cache."""
        if sequence.num_computed or sequence.block_table or not (self._is_caching and sequence.may_use_cache):
            return ()
        return self._hashes(sequence, (len(sequence.tokens) - 1) // self._block_size)

    def _hashes(self, sequence: EngineSequence, num_blocks: int) -> list[BlockHash]:
        """Of the first ``num_blocks`` blocks."""
        known = sequence.hashes
        if len(known) < num_blocks:
            tokens = sequence.tokens[: num_blocks * self._block_size]
            known += hash_blocks(tokens, self._block_size, salt=sequence.salt, known=tuple(known))
        return known[:num_blocks]
