"""One step as tensors: the scheduler's chunks laid out as rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.attention import AttentionPlan, Span
from engine.model.linear import round_up
from engine.scheduler import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Rows ``[T]`` of one forward pass: the tokens of all chunks in turn, then padding."""

    tokens_T: Tensor
    plan: AttentionPlan
    sampled: tuple[Chunk, ...]
    sampled_rows_R: Tensor
    """The last row of each sampled chunk, then padding."""
    num_tokens: int


def build_batch(chunks: Sequence[Chunk], cache: KVCache, *, num_heads: int, row_multiple: int) -> StepBatch:
    """Lay out the chunks."""
    tokens: list[int] = []
    spans: list[Span] = []
    sampled: list[Chunk] = []
    sampled_rows: list[int] = []
    for chunk in chunks:
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.end]
        spans.append(Span(block_table=sequence.block_table, start=chunk.start, num_tokens=chunk.num_tokens))
        if chunk.is_sampled:
            sampled.append(chunk)
            sampled_rows.append(len(tokens) - 1)
    num_tokens = len(tokens)
    padding = [0] * (round_up(num_tokens, row_multiple) - num_tokens)
    sampled_rows += [0] * (round_up(len(sampled_rows), row_multiple) - len(sampled_rows))
    return StepBatch(
        tokens_T=torch.tensor(tokens + padding),
        plan=AttentionPlan(cache, spans, num_heads),
        sampled=tuple(sampled),
        sampled_rows_R=torch.tensor(sampled_rows, dtype=torch.long),
        num_tokens=num_tokens,
    )
