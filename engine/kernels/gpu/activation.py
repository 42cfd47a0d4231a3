"""The gate of an MLP: ``activation(gate) * up``.

Legend: T rows, I columns of the gate (the intermediate size).
"""

from typing import Literal

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait

COLUMNS = 1024
Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up_TI: Tensor, activation: Activation = "silu") -> Tensor:
    """A new ``[T, I]`` from ``[T, 2 I]``, gate first. Arithmetic is in float32. Raises ValueError for an odd width."""
    check(gate_up_TI, "gate_up", None, None)
    num_rows, width = gate_up_TI.shape
    if width % 2:
        raise ValueError(f"gate_up has {width} columns, wanted an even number: gate and up")
    out_TI = torch.empty(num_rows, width // 2, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    if out_TI.numel():
        _gated[(num_rows, -(-width // 2 // COLUMNS))](
            gate_up_TI,
            out_TI,
            width // 2,
            gate_up_TI.stride(0),
            out_TI.stride(0),
            BLOCK=COLUMNS,
            IS_SILU=activation == "silu",
            **options(gate_up_TI, num_warps=4),
        )
    return out_TI


def gated_twin(gate_up_TI: Tensor, activation: Activation = "silu") -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up_TI.float().chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up_TI.dtype)


@jit
def _gated(
    gate_up,
    out,
    size,
    row_stride,
    out_stride,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < size
    wait(CHAINED)
    at = gate_up + row * row_stride + column
    gate = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=is_there, other=0.0).to(tl.float32)
    if IS_SILU:
        gate = gate * tl.sigmoid(gate)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)  # gelu's tanh form: (1 + tanh x) / 2 = sigmoid(2 x)
    tl.store(out + row * out_stride + column, (gate * up).to(out.dtype.element_ty), mask=is_there)
    go_ahead(CHAINED)
