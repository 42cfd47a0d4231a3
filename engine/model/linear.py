"""Linear layers whose rows do not depend on each other (the ``invariant`` mode of law 3 on CPU).

A matrix product may sum in another order when the number of rows changes; then a neighbour in the batch changes your
logits. Both kernels used here were found to give a row the same bits for any number of rows from 4 on and for any
place in the batch (tests/unit/engine/test_invariance.py checks it on the machine at hand), so the step pads its rows
to a multiple of :data:`ROW_MULTIPLE` and never runs fewer.

oneDNN's packed float32 kernel needs half the time of ``F.linear`` at 8 rows and less at 4 than ``F.linear`` at one,
so padding is free. It is reached through operators that torch compiles to but does not document; without them
``F.linear`` serves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4
MAX_SUMMANDS = 1024
"""Longer sums are cut into parts: at 1536 this brings the model's largest error from 1.6e-4 to 0.8e-4."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def has_packed_kernel() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """``y = x W^T + b`` for ``x [rows, in]``, ``W [out, in]``. Takes the weight over; float32, on CPU."""

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

    @staticmethod
    def _product(x: Tensor, part: slice, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x[:, part].contiguous(), weight, bias, "none", [], "")
        return y
