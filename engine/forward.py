"""A step computed by the model: the scheduler's chunks through the decoder, then one token from each last row."""

from collections.abc import Sequence as Seq

import torch

from engine.batch import build_batch, make_plan
from engine.execution import Computed
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.prompt_scores import score_prompts
from engine.sampler import Sampled, sample
from engine.scheduler import Chunk


class ForwardPass:
    """Weights and KV memory; an :class:`~engine.execution.Execution`."""

    def __init__(self, model: Decoder, cache: KVCache, *, invariant: bool) -> None:
        """``invariant``: rows are padded so that none depends on the others."""
        self.model = model
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
        sampled: list[Sampled] = []
        if batch.sampled:
            logits_RV = model.logits(hidden_TH[batch.sampled_rows_R])[: len(batch.sampled)]
            sampled = sample(logits_RV.cpu(), [chunk.sequence for chunk in batch.sampled])
        return Computed(sampled=tuple(sampled), num_padded_rows=len(batch.tokens_T) - batch.num_tokens)
