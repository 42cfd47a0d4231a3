"""One step of answers that never leaves the device: from the tokens drawn last, through the model, to those drawn next.

Everything it reads is in buffers at fixed addresses. So on a GPU it is recorded once for each number of rows (a
*bucket*) as one CUDA graph and then replayed; in the interpreter the same code runs as it is. Which sequence a row is
of, the host says through :meth:`DecodeStep.put`, :meth:`grow` and :meth:`stop`, in the order of the device's work: a
step that was started before is not disturbed.

Legend: R rows, B most blocks of a table, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.gpu.advance import Standing, advance
from engine.kernels.gpu.attention import Paged
from engine.kernels.gpu.sampling import Choosing, choose
from engine.kv_cache import KVCache
from engine.model.attention_gpu import GpuAttention, on_device, spread
from engine.model.decoder import Decoder
from engine.model.recorded_gpu import Progress, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A sequence at the begin of its row."""

    row: int
    token: int
    position: int
    """Of ``token``, whose KV this row's next step computes."""
    blocks: Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key_prefix: int
    """:func:`engine.sampler.key_prefix`."""


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to 16, then steps of 16 to 64 and of 64 beyond: padding costs little, and so do the graphs."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(128, max_rows, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeStep:
    """The device's memory of up to ``max_rows`` answers. Used by the step thread."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        max_rows: int,
        max_context: int,
        invariant: bool,
        buckets: Sequence[int] | None = None,
    ) -> None:
        """``invariant``: a row's bits do not depend on how many programs share its keys. ``buckets``: other numbers of
        rows than :func:`buckets_for` has; the last one is ``max_rows``."""
        device = cache.tensor.device
        self._model, self._cache, self._invariant = model, cache, invariant
        self._device = device
        self._block_size = cache.geometry.block_size
        self._standing = Standing.make(max_rows, cache.geometry.blocks_for(max_context), device)
        self._choosing = Choosing(
            temperature=torch.zeros(max_rows, device=device),
            top_k=torch.zeros(max_rows, dtype=torch.int32, device=device),
            top_p=torch.ones(max_rows, device=device),
            min_p=torch.zeros(max_rows, device=device),
            keys=self._standing.keys,
        )
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.scores_RV = torch.zeros(max_rows, model.config.vocab_size, device=device)
        """What the tokens of the last step were drawn from."""
        self._recorded = Recorded(buckets or buckets_for(max_rows), self._compute, device)
        self._plans = {size: self._plan(size) for size in self._recorded.sizes}
        self.max_rows = max_rows

    def bucket_of(self, num_rows: int) -> int:
        return self._recorded.size_of(num_rows)

    # -- what the host says -------------------------------------------------------------------------------------------

    def put(self, rows: Sequence[NewRow]) -> None:
        """Give rows to sequences."""
        if not rows:
            return
        standing, choosing = self._standing, self._choosing
        index = self._send(np.array([each.row for each in rows], np.int64))
        tables = np.zeros((len(rows), standing.tables_RB.shape[1]), np.int32)
        for place, each in enumerate(rows):
            tables[place, : len(each.blocks)] = each.blocks
        prefixes = np.array([each.key_prefix for each in rows], np.uint64).view(np.int64)
        for buffer, values in (
            (standing.tokens, np.array([each.token for each in rows], np.int64)),
            (standing.next, np.array([each.position for each in rows], np.int32)),
            (standing.prefixes, prefixes),
            (standing.tables_RB, tables),
            (choosing.temperature, np.array([each.temperature for each in rows], np.float32)),
            (choosing.top_k, np.array([each.top_k for each in rows], np.int32)),
            (choosing.top_p, np.array([each.top_p for each in rows], np.float32)),
            (choosing.min_p, np.array([each.min_p for each in rows], np.float32)),
        ):
            buffer[index] = self._send(values)

    def grow(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """``(row, place in its table, block)`` of each block that is new."""
        if blocks:
            rows, places, ids = self._send(np.array(blocks, np.int64).T)
            self._standing.tables_RB[rows, places] = ids.int()

    def stop(self, rows: Sequence[int]) -> None:
        """These rows are of no sequence any more: the next step computes nothing for them."""
        if rows:
            self._standing.next[self._send(np.array(rows, np.int64))] = -1

    def stop_all(self) -> None:
        self._standing.next.fill_(-1)

    # -- what the device does -----------------------------------------------------------------------------------------

    def run(self, num_rows: int) -> Tensor:
        """Start a step of the first ``num_rows`` rows. The tokens drawn, ``[num_rows]``, on the device: negative where
        a score is no number. They are overwritten by the next step."""
        self._recorded.run(num_rows)
        return self._standing.tokens[:num_rows]

    def record(self, progress: Progress = lambda done, of: None) -> None:
        """One graph for each bucket."""
        self.stop_all()
        self._recorded.record(progress)

    def _compute(self, size: int) -> None:
        standing, choosing = self._standing, self._choosing
        advance(standing, size, self._block_size)
        hidden = self._model.forward(standing.ids[:size], self._plans[size])
        scores_RV = self.scores_RV[:size]
        self._model.logits(hidden, scores_RV)
        drawn = Choosing(
            temperature=choosing.temperature[:size],
            top_k=choosing.top_k[:size],
            top_p=choosing.top_p[:size],
            min_p=choosing.min_p[:size],
            keys=choosing.keys[:size],
        )
        choose(scores_RV, drawn, standing.tokens[:size])

    def _plan(self, size: int) -> GpuAttention:
        standing, num_heads = self._standing, self._model.config.num_heads
        return GpuAttention(
            kv=self._cache.tensor,
            positions_T=standing.positions[:size],
            slots_T=standing.slots[:size],
            paged=Paged(
                tables_SB=standing.tables_RB[:size],
                contexts_S=standing.contexts[:size],
                query_starts=self._starts[: size + 1],
            ),
            num_heads=num_heads,
            num_real=size,
            workspace=None if self._invariant else spread(self._cache, size, num_heads),
        )

    def _send(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return on_device(torch.from_numpy(values), self._device)
