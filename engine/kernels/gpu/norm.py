"""RMSNorm, with the addition to the residual stream that comes before it, in one pass over a row.

Legend: T rows, C columns (the hidden size).
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, power_of_two, wait

MAX_COLUMNS = 32768
"""A row is held in the registers of one program."""


def rms_norm(x_TC: Tensor, gain_C: Tensor, eps: float, residual_TC: Tensor | None = None) -> Tensor:
    """``norm(x) * gain``, a new ``[T, C]`` of x's dtype. With a residual: it becomes ``residual + x`` in place, and is
    what is normed, as it was rounded. Sums are in float32. Raises ValueError for shapes that do not fit.
    """
    num_rows, num_columns = x_TC.shape
    check(x_TC, "x", None, None)
    check(gain_C, "gain", num_columns)
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"x has {num_columns} columns, the norm takes up to {MAX_COLUMNS}")
    if residual_TC is not None:
        check(residual_TC, "residual", num_rows, num_columns)
    out_TC = torch.empty_like(x_TC)
    if num_rows:
        block = power_of_two(num_columns)
        residual = x_TC if residual_TC is None else residual_TC
        _rms_norm[(num_rows,)](
            x_TC,
            residual,
            gain_C,
            out_TC,
            num_columns,
            x_TC.stride(0),
            residual.stride(0),
            out_TC.stride(0),
            eps,
            BLOCK=block,
            ADDS=residual_TC is not None,
            **options(x_TC, num_warps=min(16, max(1, block // 512))),
        )
    return out_TC


def rms_norm_twin(x_TC: Tensor, gain_C: Tensor, eps: float, residual_TC: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    if residual_TC is not None:
        residual_TC.copy_(residual_TC.float() + x_TC.float())
        normed = F.rms_norm(residual_TC.float(), gain_C.shape, gain_C.float(), eps)
    else:
        normed = F.rms_norm(x_TC.float(), gain_C.shape, gain_C.float(), eps)
    return normed.to(x_TC.dtype)


@jit
def _rms_norm(
    x,
    residual,
    gain,
    out,
    num_columns,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_there = column < num_columns
    weight = tl.load(gain + column, mask=is_there, other=0.0).to(tl.float32)
    wait(CHAINED)
    value = tl.load(x + row * x_stride + column, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        at = residual + row * residual_stride + column
        value += tl.load(at, mask=is_there, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=is_there)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / num_columns + eps)
    tl.store(out + row * out_stride + column, (value * scale * weight).to(out.dtype.element_ty), mask=is_there)
    go_ahead(CHAINED)
