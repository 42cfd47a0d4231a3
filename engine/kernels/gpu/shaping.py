"""Options that change scores before a token is chosen, on the device: grammar masks and penalties. In place; rows
without an option are not read.

Legend: R rows, V vocabulary, W = ceil(V / 32) words of a mask, S places of sequences.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait

TOKENS = 1024
SEEN = 1 << 30
"""In :func:`penalise`'s counts: the prompt has the token."""


def forbid(scores_RV: Tensor, allowed_RW: Tensor, is_masked_R: Tensor) -> None:
    """Minus infinity for every token whose bit in ``allowed_RW`` (int32, lowest bit first) is not set, in the rows that
    ``is_masked_R`` (int32) names with 1. Raises ValueError for shapes that do not fit."""
    num_rows, vocab_size = scores_RV.shape
    check(scores_RV, "scores", None, None, dtype=torch.float32)
    check(allowed_RW, "allowed", num_rows, -(-vocab_size // 32), dtype=torch.int32)
    check(is_masked_R, "is_masked", num_rows, dtype=torch.int32)
    if num_rows:
        _forbid[(num_rows, -(-vocab_size // TOKENS))](
            scores_RV,
            allowed_RW,
            is_masked_R,
            vocab_size,
            scores_RV.stride(0),
            allowed_RW.stride(0),
            BLOCK=TOKENS,
            **options(scores_RV, num_warps=4),
        )


def forbid_twin(scores_RV: Tensor, allowed_RW: Tensor, is_masked_R: Tensor) -> None:
    """The same in plain torch."""
    token = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    is_allowed = (allowed_RW[:, token // 32] >> (token % 32)) & 1
    scores_RV.masked_fill_((is_allowed == 0) & (is_masked_R == 1)[:, None], float("-inf"))


def penalise(
    scores_RV: Tensor,
    counts_SV: Tensor,
    places_R: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    """Penalties of every row by its counts ``counts_SV[places_R[row]]`` (int32): how often the answer has each token,
    plus :data:`SEEN` if the prompt has it. Repetition counts prompt and answer, the others the answer. Rows whose
    penalties are 1, 0 and 0 are left alone. Raises ValueError for shapes that do not fit.
    """
    num_rows, vocab_size = scores_RV.shape
    check(scores_RV, "scores", None, None, dtype=torch.float32)
    check(counts_SV, "counts", None, vocab_size, dtype=torch.int32)
    check(places_R, "places", num_rows)
    for name, tensor in (("repetition", repetition_R), ("frequency", frequency_R), ("presence", presence_R)):
        check(tensor, name, num_rows, dtype=torch.float32)
    if num_rows:
        _penalise[(num_rows, -(-vocab_size // TOKENS))](
            scores_RV,
            counts_SV,
            places_R,
            repetition_R,
            frequency_R,
            presence_R,
            vocab_size,
            scores_RV.stride(0),
            counts_SV.stride(0),
            BLOCK=TOKENS,
            **options(scores_RV, num_warps=4),
        )


def penalise_twin(
    scores_RV: Tensor,
    counts_SV: Tensor,
    places_R: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    """The same in plain torch."""
    counts_RV = counts_SV[places_R.long()]
    num_RV = counts_RV & (SEEN - 1)
    factor = repetition_R[:, None]
    repeated = torch.where(scores_RV > 0, scores_RV / factor, scores_RV * factor)
    scores_RV.copy_(torch.where(counts_RV > 0, repeated, scores_RV))
    scores_RV.sub_(frequency_R[:, None] * num_RV + presence_R[:, None] * (num_RV > 0))


@jit
def _forbid(
    scores,
    allowed,
    is_masked,
    vocab_size,
    row_stride,
    mask_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    go_ahead(CHAINED)
    if tl.load(is_masked + row) == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    word = tl.load(allowed + row * mask_stride + token // 32, mask=is_token, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(scores + row * row_stride + token, float("-inf"), mask=is_token & is_forbidden)


@jit
def _penalise(
    scores,
    counts,
    places,
    repetition,
    frequency,
    presence,
    vocab_size,
    row_stride,
    count_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    go_ahead(CHAINED)
    factor = tl.load(repetition + row)
    by_count = tl.load(frequency + row)
    once = tl.load(presence + row)
    if (factor == 1.0) & (by_count == 0.0) & (once == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    count = tl.load(counts + tl.load(places + row).to(tl.int64) * count_stride + token, mask=is_token, other=0)
    num = count & 0x3FFFFFFF
    at = scores + row * row_stride + token
    score = tl.load(at, mask=is_token & (count > 0), other=0.0)
    score = tl.where(score > 0, tl.math.div_rn(score, factor), score * factor)
    score = score - (by_count * num + tl.where(num > 0, once, 0.0))
    tl.store(at, score, mask=is_token & (count > 0))
