"""One step as tensors: the scheduler's chunks laid out as rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.attention import AttentionPlan, Span
from engine.model.attention_cpu import CpuAttention
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


def make_plan(
    cache: KVCache, spans: Sequence[Span], num_heads: int, *, num_rows: int = 0, invariant: bool = True
) -> AttentionPlan:
    """The attention of a step of ``num_rows`` rows on the cache's device."""
    if not cache.device.has_triton:
        return CpuAttention(cache, spans, num_heads)
    from engine.model.attention_gpu import GpuAttention  # imports Triton

    return GpuAttention.of_spans(cache, spans, num_heads, num_rows=num_rows, invariant=invariant)


def build_batch(
    chunks: Sequence[Chunk], cache: KVCache, *, num_heads: int, row_multiple: int, invariant: bool = True
) -> StepBatch:
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
    device = cache.device.torch
    return StepBatch(
        tokens_T=torch.tensor(tokens + padding).to(device),
        plan=make_plan(cache, spans, num_heads, num_rows=len(tokens) + len(padding), invariant=invariant),
        sampled=tuple(sampled),
        sampled_rows_R=torch.tensor(sampled_rows, dtype=torch.long).to(device),
        num_tokens=num_tokens,
    )
