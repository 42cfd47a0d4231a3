"""A step of few tokens, prompts among them, as one graph: the device is through with a short prompt in less time than
the host needs to start its kernels one by one.

Legend: T rows, S sequences, B most blocks of a table, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.gpu.attention import Paged
from engine.kv_cache import KVCache
from engine.model.attention_gpu import GpuAttention, on_device
from engine.model.decoder import Decoder
from engine.model.recorded_gpu import Progress, Recorded
from engine.scheduler import Chunk

MAX_SEQUENCES = 8
SIZES = (16, 32, 64, 128, 256)


class PromptStep:
    """Up to the last of ``sizes`` tokens of up to :data:`MAX_SEQUENCES` sequences. Used by the step thread."""

    def __init__(self, model: Decoder, cache: KVCache, *, max_context: int, sizes: Sequence[int] = SIZES) -> None:
        self._model, self._cache = model, cache
        device = self._device = cache.tensor.device
        most_tokens, most_blocks = sizes[-1], cache.geometry.blocks_for(max_context)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._ids_T, self._slots_T = (zeros(most_tokens, dtype=torch.int64) for _ in range(2))
        self._slots_T.fill_(-1)
        self._positions_T = zeros(most_tokens)
        self._paged = Paged(
            tables_SB=zeros(MAX_SEQUENCES, most_blocks),
            contexts_S=zeros(MAX_SEQUENCES),
            query_starts=zeros(MAX_SEQUENCES + 1),
        )
        self._sampled_S = zeros(MAX_SEQUENCES, dtype=torch.int64)
        self.scores_SV = torch.zeros(MAX_SEQUENCES, model.config.vocab_size, device=device)
        self._recorded = Recorded(sizes, self._compute, device)

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return (
            len(chunks) <= MAX_SEQUENCES
            and num_tokens <= self._recorded.sizes[-1]
            and all(chunk.sequence.prompt_scores is None for chunk in chunks)
        )

    def record(self, progress: Progress) -> None:
        self._recorded.record(progress)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """The scores of the last row of each chunk that is sampled, ``[R, V]``; until the next step."""
        self._fill(chunks)
        self._recorded.run(sum(chunk.num_tokens for chunk in chunks))
        return self.scores_SV[: sum(chunk.is_sampled for chunk in chunks)]

    def _fill(self, chunks: Sequence[Chunk]) -> None:
        block_size = self._cache.geometry.block_size
        starts = np.zeros(MAX_SEQUENCES + 1, np.int32)
        starts[1:] = np.cumsum([*(chunk.num_tokens for chunk in chunks), *[0] * (MAX_SEQUENCES - len(chunks))])
        contexts = np.zeros(MAX_SEQUENCES, np.int32)
        contexts[: len(chunks)] = [chunk.end for chunk in chunks]
        tables = np.zeros(tuple(self._paged.tables_SB.shape), np.int32)
        size = self._recorded.size_of(int(starts[-1]))
        ids, positions, slots = np.zeros(size, np.int64), np.zeros(size, np.int32), np.full(size, -1, np.int64)
        for row, chunk in enumerate(chunks):
            rows = slice(int(starts[row]), int(starts[row + 1]))
            own = np.arange(chunk.start, chunk.end)
            table = np.array(chunk.sequence.block_table, np.int64)
            tables[row, : len(table)] = table
            ids[rows] = chunk.sequence.tokens[chunk.start : chunk.end]
            positions[rows] = own
            slots[rows] = table[own // block_size] * block_size + own % block_size
        sampled = np.zeros(MAX_SEQUENCES, np.int64)
        last = [int(starts[row + 1]) - 1 for row, chunk in enumerate(chunks) if chunk.is_sampled]
        sampled[: len(last)] = last
        for buffer, values in (
            (self._ids_T[:size], ids),
            (self._positions_T[:size], positions),
            (self._slots_T[:size], slots),
            (self._paged.tables_SB, tables),
            (self._paged.contexts_S, contexts),
            (self._paged.query_starts, starts),
            (self._sampled_S, sampled),
        ):
            buffer.copy_(on_device(torch.from_numpy(values), self._device))

    def _compute(self, size: int) -> None:
        plan = GpuAttention(
            kv=self._cache.tensor,
            positions_T=self._positions_T[:size],
            slots_T=self._slots_T[:size],
            paged=self._paged,
            num_heads=self._model.config.num_heads,
            num_real=size,
            workspace=None,
        )
        hidden = self._model.forward(self._ids_T[:size], plan)
        self._model.logits(hidden[self._sampled_S], self.scores_SV)
