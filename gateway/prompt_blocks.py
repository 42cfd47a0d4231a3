"""The names of a prompt's KV blocks: by them the router finds the workers that hold what a prompt begins with."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.ids import BlockHash
from core.kv import hash_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """Of the complete blocks, as workers name them: chained, and never the same for two tenants (core/kv.py)."""

    block_size: int
    salt: str
    hashes: tuple[BlockHash, ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], *, block_size: int, salt: str) -> "PromptBlocks":
        """About 0.07 ms for 1,000 tokens: work for a text thread."""
        return cls(block_size=block_size, salt=salt, hashes=tuple(hash_blocks(token_ids, block_size, salt=salt)))

    def with_answer(self, prompt: Sequence[int], accepted: Sequence[int]) -> tuple[BlockHash, ...]:
        """Of the prompt and what was accepted behind it: a retry reads both."""
        if not accepted:
            return self.hashes
        return self.hashes + tuple(
            hash_blocks((*prompt, *accepted), self.block_size, salt=self.salt, known=self.hashes)
        )
