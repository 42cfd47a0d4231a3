"""Products on a GPU, in the dtype of the hidden states: cuBLAS, with the norm before them in one kernel of ours.

``invariant``: by a kernel of ours too, whose sums have one order for any number of rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.gpu.activation import gated
from engine.kernels.gpu.linear import linear
from engine.kernels.gpu.norm import rms_norm
from engine.model.linear import Linear
from modelfiles.families import Activation


class _InvariantLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        linear(x, self._weight, self._bias, residual)


class GpuLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.T

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """The sum is a part of the product: one kernel."""
        residual.addmm_(x, self._transposed)
        if self._bias is not None:
            residual.add_(self._bias)


class GpuNormedLinear:
    def __init__(self, gain: Tensor, linear: Linear, eps: float) -> None:
        self._gain, self._linear, self._eps = gain, linear, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(rms_norm(x, self._gain, self._eps))


class _ExactNormedLinear:
    """In float32: what chooses experts must not be rounded."""

    def __init__(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._gain, self._weight, self._bias, self._eps = gain, weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x.float(), self._gain, self._eps), self._weight, self._bias)


class GpuLinears:
    """``row_multiple`` is 1: how cuBLAS sums depends on the number of rows whatever it is, and our kernel's tiles have
    one size."""

    row_multiple = 1

    def __init__(self, dtype: torch.dtype, device: torch.device, *, invariant: bool) -> None:
        self.dtype, self.device = dtype, device
        self._product = _InvariantLinear if invariant else GpuLinear

    def vector(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)

    def embedding(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        return lambda gate_up: gated(gate_up, activation)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_residual: bool = False) -> Linear:
        return self._product(self.embedding(weight), None if bias is None else self.vector(bias))

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> GpuNormedLinear:
        return GpuNormedLinear(self.vector(gain), self.linear(weight, bias), eps)

    def router(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> _ExactNormedLinear:
        placed = None if bias is None else bias.to(self.device)
        return _ExactNormedLinear(gain.to(self.device), weight.to(self.device), placed, eps)
