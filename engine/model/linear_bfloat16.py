"""Products in bfloat16 with float32 sums: half the bytes of float32, with weights that oneDNN has packed beforehand.

Rows come and go in float32; the norm before a product is computed in float32 and its gain stays outside the weight,
so that only the input, the weight and the output of the product itself are rounded. Processors without bfloat16
instructions compute the same, slowly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import CpuLinears
from engine.model.linear_float32 import Float32NormedLinear, has_packed_kernel


class Bfloat16Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._is_packed = has_packed_kernel()
        half = weight.to(torch.bfloat16)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(half, None) if self._is_packed else half
        self._bias = bias

    def product(self, x: Tensor) -> Tensor:
        """``x W^T`` in bfloat16, without the bias: rounding a large bias away would cost more than the product."""
        if not self._is_packed:
            return F.linear(x.to(torch.bfloat16), self._weight)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), self._weight, None, "none", [], "")
        return y

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x).to(torch.float32)
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self.product(x))
        if self._bias is not None:
            residual.add_(self._bias)


class Bfloat16NormedLinear:
    def __init__(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._gain, self._eps = gain, eps
        self._linear = Bfloat16Linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(F.rms_norm(x, self._gain.shape, self._gain, self._eps))


class Bfloat16Linears(CpuLinears):
    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_residual: bool = False) -> Bfloat16Linear:
        return Bfloat16Linear(weight, bias)

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Bfloat16NormedLinear:
        return Bfloat16NormedLinear(gain, weight, bias, eps)

    def router(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Float32NormedLinear:
        return Float32NormedLinear(gain, weight, bias, eps)
