"""One step as tensors: the scheduler's chunks laid out as rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.attention import AttentionPlan
from engine.model.keys import Span
from engine.model.linear import round_up
from engine.model.mirror import KVMirror
from engine.scheduler import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Rows ``[T]`` of one forward pass: the tokens of all chunks in turn, then padding."""

    tokens_T: Tensor
    positions_T: Tensor
    plan: AttentionPlan
    sampled: tuple[Chunk, ...]
    sampled_rows_R: Tensor
    """The last row of each sampled chunk, then padding."""
    num_tokens: int


def build_batch(
    chunks: Sequence[Chunk], cache: KVCache, *, num_heads: int, row_multiple: int, mirror: KVMirror | None = None
) -> StepBatch:
    """Lay out the chunks and prepare their blocks: one that a chunk begins and does not fill is cleared."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    sampled: list[Chunk] = []
    sampled_rows: list[int] = []
    block_size = cache.geometry.block_size
    for chunk in chunks:
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        spans.append(
            Span(block_table=sequence.block_table, start=chunk.start, num_tokens=chunk.num_tokens, owner=sequence)
        )
        last_block = chunk.end // block_size
        if chunk.end % block_size and last_block * block_size >= chunk.start:
            cache.clear([sequence.block_table[last_block]])
        if chunk.is_sampled:
            sampled.append(chunk)
            sampled_rows.append(len(tokens) - 1)
    num_tokens = len(tokens)
    padding = [0] * (round_up(num_tokens, row_multiple) - num_tokens)
    sampled_rows += [0] * (round_up(len(sampled_rows), row_multiple) - len(sampled_rows))
    return StepBatch(
        tokens_T=torch.tensor(tokens + padding),
        positions_T=torch.tensor(positions + padding),
        plan=AttentionPlan(cache, spans, num_heads, mirror),
        sampled=tuple(sampled),
        sampled_rows_R=torch.tensor(sampled_rows, dtype=torch.long),
        num_tokens=num_tokens,
    )
