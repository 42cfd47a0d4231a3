"""Messages that would be too long are sent as several: log probabilities of a long prompt are megabytes."""

from collections.abc import Iterator
from dataclasses import replace

from core.types import StepOutputs, TokenChunk, TokenLogprobs

PART_SCORES = 1 << 16
"""Scores (of a token itself or among its most likely ones) in one message: about a megabyte."""

Scores = tuple[TokenLogprobs, ...]


def split_scores(scores: Scores) -> list[Scores]:
    """In order, each part within the bound; at least one part."""
    num_each = 1 + max((len(one.top) for one in scores), default=0)
    size = max(1, PART_SCORES // num_each)
    return [scores[start : start + size] for start in range(0, len(scores), size)] or [()]


def split_outputs(outputs: StepOutputs) -> Iterator[StepOutputs]:
    """The message, with long prompt scores in messages of their own before it."""
    if not any(chunk.prompt_logprobs for chunk in outputs.chunks):
        yield outputs
        return
    chunks: list[TokenChunk] = []
    for chunk in outputs.chunks:
        *before, last = split_scores(chunk.prompt_logprobs)
        for part in before:
            bare = replace(chunk, token_ids=(), logprobs=(), finish_reason=None, stop_token_id=None, stages=None)
            yield StepOutputs(age_s=outputs.age_s, chunks=(replace(bare, prompt_logprobs=part),))
        chunks.append(replace(chunk, prompt_logprobs=last))
    yield replace(outputs, chunks=tuple(chunks))
