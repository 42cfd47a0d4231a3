"""Float32 products whose rows do not depend on each other.

A matrix product may sum in another order when the number of rows changes; then a neighbour in the batch changes your
logits. Both kernels used here were found to give a row the same bits for any number of rows from 4 on and for any
place in the batch, so a step pads its rows to a multiple of :data:`~engine.model.linear.ROW_MULTIPLE` and never runs
fewer.

oneDNN's packed float32 kernel needs half the time of ``F.linear`` at 8 rows and less at 4 than ``F.linear`` at one,
so padding is free. It is reached through operators that torch compiles to but does not document; without them
``F.linear`` serves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import CpuLinears

MAX_SUMMANDS = 1024
"""Longer sums are cut into parts: at 1536 this brings the model's largest error from 1.6e-4 to 0.8e-4."""


def has_packed_kernel() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Float32Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dtype == torch.float32 and weight.device.type == "cpu"
        self._bias = bias
        self._is_packed = has_packed_kernel()
        num_inputs = weight.shape[1]
        if not self._is_packed:
            self._parts: list[tuple[slice, Tensor]] = [(slice(None), weight)]
            return
        # The packed kernel adds up a row's products one after the other, so its error grows with their number.
        size = -(-num_inputs // -(-num_inputs // MAX_SUMMANDS))
        slices = [slice(first, first + size) for first in range(0, num_inputs, size)]
        self._parts = [
            (part, torch.ops.mkldnn._reorder_linear_weight(weight[:, part].contiguous(), None)) for part in slices
        ]

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_packed:
            return F.linear(x, self._parts[0][1], self._bias)
        y = self._product(x, *self._parts[0], self._bias)
        for part, weight in self._parts[1:]:
            y.add_(self._product(x, part, weight, None))
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))

    @staticmethod
    def _product(x: Tensor, part: slice, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x[:, part].contiguous(), weight, bias, "none", [], "")
        return y


class Float32NormedLinear:
    """The gain stays outside the weight: folding it in would round once more than the reference does."""

    def __init__(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._gain, self._eps = gain, eps
        self._linear = Float32Linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(F.rms_norm(x, self._gain.shape, self._gain, self._eps))


class Float32Linears(CpuLinears):
    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_residual: bool = False) -> Float32Linear:
        return Float32Linear(weight, bias)

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Float32NormedLinear:
        return Float32NormedLinear(gain, weight, bias, eps)

    def router(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Float32NormedLinear:
        return Float32NormedLinear(gain, weight, bias, eps)
