"""The digest ``wsum64`` of KV blocks in GPU memory (what it is: :mod:`kvtransfer.digest`).

Legend: B blocks asked for, K kv heads, W 64-bit words of one head of one block.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait

WORDS = 1024


def wsum64(kv: Tensor, blocks_B: Tensor) -> Tensor:
    """int64 ``[B, K]``: for each block and kv head ``sum(word_i * (2 i + 1))`` mod 2^64, as the bits of an int64.

    ``kv``: ``[block, K, layer, k/v, slot, D]``, dense; ``blocks_B``: int32 or int64. Raises ValueError for memory that
    is not made of whole words.
    """
    check(blocks_B, "blocks", None)
    head_bytes = kv[0, 0].numel() * kv.element_size()
    if not kv.is_contiguous() or head_bytes % 8:
        raise ValueError(f"kv of shape {tuple(kv.shape)} is not dense, or a head of a block is no multiple of 8 bytes")
    words = kv.view(kv.shape[0], kv.shape[1], -1).view(torch.int64)
    out_BK = torch.empty(len(blocks_B), kv.shape[1], dtype=torch.int64, device=kv.device)
    if out_BK.numel():
        _wsum64[tuple(out_BK.shape)](
            words, blocks_B, out_BK, words.shape[2], words.stride(0), BLOCK=WORDS, **options(kv, num_warps=4)
        )
    return out_BK


def wsum64_twin(kv: Tensor, blocks_B: Tensor) -> Tensor:
    """The same in plain torch: its integers wrap around too."""
    words = kv.view(kv.shape[0], kv.shape[1], -1).view(torch.int64)[blocks_B.long()]
    weights = 2 * torch.arange(words.shape[2], device=kv.device) + 1
    return (words * weights).sum(-1)


@jit
def _wsum64(
    words,
    blocks,
    out,
    num_words,
    block_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    wait(CHAINED)
    start = words + tl.load(blocks + index).to(tl.int64) * block_stride + head.to(tl.int64) * num_words
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        value = tl.load(start + word, mask=word < num_words, other=0)
        total += value * (2 * word.to(tl.int64) + 1)
    tl.store(out + index * tl.num_programs(1) + head, tl.sum(total, 0))
    go_ahead(CHAINED)
