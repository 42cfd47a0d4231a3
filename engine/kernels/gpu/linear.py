"""Products with tiles of one size, whatever the number of rows: a row has the same bits alone and among others.

cuBLAS chooses an algorithm, and with it an order of sums, by the number of rows. This is for the ``invariant`` mode.

Legend: T rows, C inputs, N outputs.
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait

ROWS, OUTPUTS, INPUTS = 16, 64, 64
"""Of a tile. Few rows: steps of answers are what is waited for."""


def linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None, residual_TN: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of x's dtype, summed in float32; a new ``[T, N]``, or added to ``residual_TN`` in place, which is
    rounded once. Raises ValueError for shapes that do not fit."""
    num_rows, num_inputs = x_TC.shape
    check(x_TC, "x", None, None)
    check(weight_NC, "weight", None, num_inputs, dtype=x_TC.dtype)
    num_outputs = len(weight_NC)
    if bias_N is not None:
        check(bias_N, "bias", num_outputs)
    if residual_TN is not None:
        check(residual_TN, "residual", num_rows, num_outputs, dtype=x_TC.dtype)
    out_TN = torch.empty(num_rows, num_outputs, dtype=x_TC.dtype, device=x_TC.device)
    out_TN = out_TN if residual_TN is None else residual_TN
    if out_TN.numel():
        _linear[(-(-num_outputs // OUTPUTS), -(-num_rows // ROWS))](
            x_TC,
            weight_NC,
            weight_NC if bias_N is None else bias_N,
            out_TN,
            num_rows,
            num_outputs,
            num_inputs,
            x_TC.stride(0),
            weight_NC.stride(0),
            out_TN.stride(0),
            HAS_BIAS=bias_N is not None,
            ADDS=residual_TN is not None,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            **options(x_TC, num_warps=4, num_stages=4),
        )
    return out_TN


def linear_twin(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None, residual_TN: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    out = F.linear(x_TC.float(), weight_NC.float(), None if bias_N is None else bias_N.float())
    if residual_TN is None:
        return out.to(x_TC.dtype)
    return residual_TN.copy_(residual_TN.float() + out)


@jit
def _linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, INPUTS)
    is_row, is_output = row < num_rows, n < num_outputs
    from_x = x + row.to(tl.int64)[:, None] * x_stride
    from_weight = weight + n.to(tl.int64)[:, None] * weight_stride
    wait(CHAINED)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, num_inputs, INPUTS):
        column = (first + c)[None, :]
        is_input = column < num_inputs
        x_tile = tl.load(from_x + column, mask=is_row[:, None] & is_input, other=0.0)
        weight_tile = tl.load(from_weight + column, mask=is_output[:, None] & is_input, other=0.0)
        sums += tl.dot(x_tile, tl.trans(weight_tile), input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_stride + n[None, :]
    is_there = is_row[:, None] & is_output[None, :]
    if ADDS:
        sums += tl.load(to, mask=is_there, other=0.0).to(tl.float32)
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_there)
    go_ahead(CHAINED)
