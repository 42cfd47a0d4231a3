"""Runs sequences through an engine and notes what came out: tokens and the very scores they were drawn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import engine.forward as forward_module
from core.ids import RequestId
from core.types import SamplingParams
from engine.batch import build_batch
from engine.engine import Engine, SequenceOutput
from engine.scheduler import Chunk
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceKey

_names = itertools.count()


def make_sequence(tokens: Iterable[int], *, num_prompt_tokens: int | None = None, **options: Any) -> EngineSequence:
    """A greedy sequence unless `options` (of SamplingParams or of Sequence) say otherwise."""
    names = ("pause_at", "is_kept", "num_computed", "block_table", "reservation", "priority", "salt")
    fields = {name: options.pop(name) for name in names if name in options}
    given = list(tokens)
    key = SequenceKey(RequestId(f"r{next(_names)}"), 1, options.pop("choice", 0))
    return EngineSequence(
        key=key,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options}),
        tokens=given,
        num_prompt_tokens=len(given) if num_prompt_tokens is None else num_prompt_tokens,
        **fields,
    )


@dataclass
class Recorded:
    """Per sequence: generated tokens, their raw scores, the outputs."""

    tokens: dict[SequenceKey, list[int]] = field(default_factory=dict)
    scores: dict[SequenceKey, list[Tensor]] = field(default_factory=dict)
    outputs: dict[SequenceKey, list[SequenceOutput]] = field(default_factory=dict)


@contextmanager
def recording() -> Any:
    """While open, the raw scores of every sampled row are kept."""
    recorded = Recorded()
    inner = forward_module.sample

    def sample(logits: Tensor, sequences: Sequence[EngineSequence]) -> Any:
        for row, sequence in zip(logits.clone(), sequences, strict=True):
            recorded.scores.setdefault(sequence.key, []).append(row)
        return inner(logits, sequences)

    forward_module.sample = sample
    try:
        yield recorded
    finally:
        forward_module.sample = inner


def run(engine: Engine, *sequences: EngineSequence, max_steps: int = 10_000) -> Recorded:
    """Add the sequences, step until nothing is left to do, check that the blocks are accounted for after every step."""
    with recording() as recorded:
        for sequence in sequences:
            engine.add(sequence)
        for _ in range(max_steps):
            if not engine.has_work:
                return recorded
            for output in engine.step().outputs:
                recorded.outputs.setdefault(output.key, []).append(output)
                if output.error is None:
                    recorded.tokens.setdefault(output.key, []).append(output.token_id)
            assert engine.pool.counts().is_conserved()
    raise AssertionError(f"still running after {max_steps} steps")


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for index, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(mine, theirs), f"scores of token {index} differ by {(mine - theirs).abs().max():.2e}"


def teacher_forced(engine: Engine, tokens: list[int], *, last: int = 0) -> Tensor:
    """The engine's scores of every position, or of so many `last` ones (a multiple of 4)."""
    blocks = engine.pool.allocate(engine.geometry.blocks_for(len(tokens)))
    sequence = make_sequence(tokens, block_table=blocks)
    chunk = Chunk(sequence=sequence, start=0, num_tokens=len(tokens))
    model = engine.model
    with torch.inference_mode():
        batch = build_batch([chunk], engine.cache, num_heads=model.config.num_heads, row_multiple=model.row_multiple)
        hidden = model.forward(batch.tokens_T, batch.plan)
        scores = model.logits(hidden[len(tokens) - last : len(tokens)] if last else hidden)[: len(tokens)]
    engine.pool.free(blocks)
    return scores
