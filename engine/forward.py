"""A step computed by the model: the scheduler's chunks through the decoder, then one token from each last row."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import build_batch, make_plan
from engine.execution import Computed
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.prompt_scores import score_prompts
from engine.sampler import Sampled, sample
from engine.scheduler import Chunk
from engine.sequence import Sequence

Draw = Callable[[Tensor, Seq[Sequence]], Seq[Sampled]]
"""``draw(scores, sequences)``: a token for each row. The scores may be overwritten."""


def draw(scores_RV: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """On the host, with every option."""
    return sample(scores_RV.cpu(), sequences)


class ForwardPass:
    """Weights and KV memory; an :class:`~engine.execution.Execution`."""

    looks_ahead = False

    def __init__(self, model: Decoder, cache: KVCache, *, invariant: bool, draw: Draw = draw) -> None:
        """``invariant``: rows are padded so that none depends on the others."""
        self.model = model
        self._draw = draw
        self._cache = cache
        self._invariant = invariant
        self._row_multiple = model.row_multiple if invariant else 1
        model.compile(make_plan(cache, [], model.config.num_heads, num_rows=1))

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> Computed:
        model = self.model
        batch = build_batch(
            chunks,
            self._cache,
            num_heads=model.config.num_heads,
            row_multiple=self._row_multiple,
            invariant=self._invariant,
        )
        hidden_TH = model.forward(batch.tokens_T, batch.plan)
        if any(chunk.sequence.prompt_scores is not None for chunk in chunks):
            score_prompts(model.logits, hidden_TH, chunks, self._row_multiple)
        sampled: Seq[Sampled] = ()
        if batch.sampled:
            logits_RV = model.logits(hidden_TH[batch.sampled_rows_R])[: len(batch.sampled)]
            sampled = self._draw(logits_RV, [chunk.sequence for chunk in batch.sampled])
        num_padded_rows = len(batch.tokens_T) - batch.num_tokens
        return Computed(chunks=tuple(chunks), sampled=tuple(sampled), num_padded_rows=num_padded_rows)

    def settle(self, sequence: Sequence) -> None:
        """A step has ended when :meth:`run` returns."""
