"""Matrix products of a model, by dtype: :func:`make_linears` is the only way to them.

All take and return rows of hidden states, on CPU in float32; what they compute in is their own business. A row's result
does not depend on the other rows of the step when their number is a multiple of :attr:`Linears.row_multiple` (the
``invariant`` mode of law 3 on CPU; tests/unit/engine/test_invariance.py checks it on the machine at hand).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import Device
from modelfiles.families import Activation

ROW_MULTIPLE = 4
"""No kernel in use wants more, so padding to this is always enough."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Linear(Protocol):
    """``y = x W^T + b`` for ``x [rows, in]``, ``W [out, in]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """A new ``[rows, out]``, the caller's to overwrite."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b``, in place."""


class NormedLinear(Protocol):
    """``y = (rms_norm(x) * gain) W^T + b``: takes the hidden states as they are, before the norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """A new ``[rows, out]``, the caller's to overwrite."""


class Linears(Protocol):
    """Makes the products of one dtype. Weights are float32 and taken over; they may be folded and packed."""

    @property
    def row_multiple(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""

    @property
    def device(self) -> torch.device: ...

    def vector(self, values: Tensor) -> Tensor:
        """What rows of hidden states are multiplied with."""

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """From ``[rows, 2 size]``, the gate first, a new ``[rows, size]``: ``activation(gate) * up``."""

    def embedding(self, weight: Tensor) -> Tensor:
        """The table whose rows the hidden states begin as: they may live in another basis than the files'."""

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_residual: bool = False) -> Linear:
        """``is_residual``: the result is added to the hidden states as it is."""

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> NormedLinear:
        """``gain`` is what the normalised row is multiplied with: families that store gain - 1 add the 1 first."""

    def router(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> NormedLinear:
        """As :meth:`normed`, for results that choose: never quantised."""


class CpuLinears:
    """What the products on CPU have in common."""

    row_multiple = ROW_MULTIPLE
    dtype = torch.float32
    device = torch.device("cpu")

    def vector(self, values: Tensor) -> Tensor:
        return values

    def embedding(self, weight: Tensor) -> Tensor:
        return weight

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        return _silu_gate if activation == "silu" else _gelu_gate


def _silu_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gelu_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def make_linears(
    dtype: str, device: Device = Device.CPU, *, may_rotate: bool = True, invariant: bool = True
) -> Linears:
    """The products of a resolved dtype (never ``auto``).

    ``invariant``: on a GPU a row's result does not depend on the other rows, at a price; on a CPU it never does.

    ``may_rotate``: the hidden states are read by :meth:`Linears.normed` only and written by the embedding and residual
    products only, so their basis is free.
    """
    from engine.model.linear_bfloat16 import Bfloat16Linears
    from engine.model.linear_float32 import Float32Linears
    from engine.model.linear_int8 import Int8Linears

    if device.has_triton:
        from engine.model.linear_gpu import GpuLinears

        return GpuLinears(getattr(torch, dtype), device.torch, invariant=invariant)
    if dtype == "int8":
        return Int8Linears(may_rotate=may_rotate)
    if dtype == "bfloat16":
        return Bfloat16Linears()
    assert dtype == "float32", f"{dtype} is no resolved dtype"
    return Float32Linears()
