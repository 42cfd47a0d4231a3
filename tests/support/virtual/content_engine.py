"""The real engine without its arithmetic: scheduler, block tables, pool, copy-on-write and stop rules are the
product's; in place of a model there is *content*, the bytes that the KV of a token must have after the tokens before
it. Whatever a step reads it compares, so a wrong, stale or half-written block cannot pass for a right one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from hashlib import blake2b, shake_128

import numpy as np
from numpy.typing import NDArray

from core.kv import KVFormat
from engine.block_pool import BlockPool
from engine.block_table import BlockTables
from engine.config import EngineLimits
from engine.engine import Engine, EngineCounters
from engine.execution import Computed
from engine.kv_cache import KVCache, KVShape
from engine.sampler import Sampled
from engine.scheduler import Chunk, Limits, Scheduler
from engine.sequence import Sequence

BLOCK_SIZE, LAYERS, HEADS, HEAD_DIM = 4, 2, 2, 2
VOCAB = 61
MAX_CONTEXT = 96
SHAPE = KVShape(block_size=BLOCK_SIZE, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
FORMAT = KVFormat(
    model_digest="content",
    tokenizer_digest="t",
    template_digest="c",
    compute_dtype="float32",
    kv_dtype="float32",
    quantisation="none",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
)
_TOKEN_SHAPE = (HEADS, LAYERS, 2, HEAD_DIM)
_TOKEN_BYTES = HEADS * LAYERS * 2 * HEAD_DIM * 4


@lru_cache(maxsize=1 << 14)
def content_of(tokens: tuple[int, ...], start: int) -> NDArray[np.uint32]:
    """KV of ``tokens[start:]`` after all before: [head, layer, k/v, token, dim]."""
    rows = [
        np.frombuffer(shake_128(bytes(tokens[: end + 1])).digest(_TOKEN_BYTES), dtype="<u4").reshape(_TOKEN_SHAPE)
        for end in range(start, len(tokens))
    ]
    return np.stack(rows, axis=3)


def next_token(tokens: list[int]) -> int:
    """The one continuation of ``tokens``."""
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def answer_to(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ContentEngine(Engine):
    """``on_wrong(sequence, position in its table, block)`` hears of every block that attention would have read
    wrongly."""

    def __init__(
        self,
        *,
        num_blocks: int,
        on_wrong: Callable[[Sequence, int, int], None],
        max_step_tokens: int = 16,
        max_sequences: int = 8,
        projected_tokens: int = 4,
    ) -> None:
        self.format = FORMAT
        self.limits = EngineLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            block_bytes=SHAPE.block_bytes,
            max_context=MAX_CONTEXT,
            vocab_size=VOCAB,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
        )
        self.cache = KVCache(SHAPE, num_blocks)
        self.kv: NDArray[np.uint32] = self.cache.tensor.numpy().view("<u4")
        """[block, head, layer, k/v, slot, dim]"""
        self.pool = BlockPool(num_blocks)
        self._on_wrong = on_wrong
        self._totals = EngineCounters()
        self._is_caching = True
        self._tables = BlockTables(
            self.pool, block_size=BLOCK_SIZE, copy_block=self._copy_block, is_caching=self._is_caching
        )
        limits = Limits(
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_mixed_tokens=max_step_tokens,
            projected_tokens=projected_tokens,
        )
        self._scheduler = Scheduler(self.pool, self._tables, limits)
        self._sequences = {}
        self.execution = self
        self.num_computed = 0
        """Tokens."""

    def _copy_block(self, source: int, target: int, num_slots: int) -> None:
        self.kv[target, ..., :num_slots, :] = self.kv[source, ..., :num_slots, :]
        self.kv[target, ..., num_slots:, :] = 0

    looks_ahead = False

    def run(self, chunks: Seq[Chunk]) -> Computed:
        """It is its own :class:`~engine.execution.Execution`."""
        for chunk in chunks:
            self._attend(chunk.sequence, chunk.start)
            self._write(chunk)
            self.num_computed += chunk.end - chunk.start
        sampled = [Sampled(token_id=next_token(chunk.sequence.tokens)) for chunk in chunks if chunk.is_sampled]
        return Computed(chunks=tuple(chunks), sampled=tuple(sampled))

    def settle(self, sequence: Sequence) -> None:
        """A step has ended when :meth:`run` returns."""

    def _attend(self, sequence: Sequence, num_tokens: int) -> None:
        """Read the KV of the first ``num_tokens`` tokens."""
        tokens = tuple(sequence.tokens[:num_tokens])
        for index, start in enumerate(range(0, num_tokens, BLOCK_SIZE)):
            expected = content_of(tokens[: start + BLOCK_SIZE], start)
            block = sequence.block_table[index]
            if self.kv[block, ..., : expected.shape[3], :].tobytes() != expected.tobytes():
                self._on_wrong(sequence, index, block)

    def _write(self, chunk: Chunk) -> None:
        tokens = tuple(chunk.sequence.tokens[: chunk.end])
        start = chunk.start
        while start < chunk.end:
            index, slot = divmod(start, BLOCK_SIZE)
            end = min((index + 1) * BLOCK_SIZE, chunk.end)
            part = content_of(tokens[:end], start)
            self.kv[chunk.sequence.block_table[index], ..., slot : slot + end - start, :] = part
            start = end
