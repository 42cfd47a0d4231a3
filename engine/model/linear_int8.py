"""Products in 8 bits: weights scaled by output row, inputs by their own largest value, exact sums in 32-bit integers.

A row is divided by its largest magnitude, so that one fixed scale (1/127) fits every row of every batch; the product
is multiplied back. Integer sums are exact in any order, so a row's bits depend on that row alone and no padding is
needed. A scale per tensor (``quantized.linear_dynamic``) would let a neighbour in the batch change your logits.

A norm before a product costs two numbers a row: with the gain folded into the weight, ``rms_norm(x) = x / rms(x)``
differs from ``x / max|x|`` by a factor, which joins the output's scale.

The hidden states are kept in a rotated basis (:mod:`engine.model.rotation`): in the files' own, a row's largest
number is so far above the others that 8 bits lose them.

The kernel (FBGEMM's, VNNI where the processor has it) quantises inside the product. It takes its weights as a quantised
tensor, a type that torch means to remove (pytorch issue 184982): without it oneDNN's product on plain integers serves.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import ROW_MULTIPLE, CpuLinears
from engine.model.linear_float32 import Float32NormedLinear
from engine.model.rotation import rotation

LEVELS = 127
ZERO_POINT = 128
"""Inputs are unsigned in the kernel: -127..127 becomes 1..255."""
TINIEST = 1e-30
"""The least scale of a weight row."""

Product = Callable[[Tensor], Tensor]
"""From rows within -1..1, ``[rows, in]``, to ``[rows, out]`` in float32."""


def has_fused_kernel() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32"
    )


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers ``[out, in]`` in -127..127 and the scale of each row, ``[out]``."""
    scale = (weight.abs().amax(1) / LEVELS).clamp_min(TINIEST)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def make_product(weight: Tensor) -> Product:
    integers, scale = quantise_weight(weight)
    return _fused_product(integers, scale) if has_fused_kernel() else _onednn_product(integers, scale)


def _fused_product(integers: Tensor, scale: Tensor) -> Product:
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        try:
            torch.backends.quantized.engine = "fbgemm"  # other engines lack the product
            zeros = torch.zeros(len(scale), dtype=torch.int64)
            quantised = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
            packed = torch.ops.quantized.linear_prepack(quantised, None)
        finally:
            torch.backends.quantized.engine = before
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def product(x: Tensor) -> Tensor:
        y: Tensor = kernel(x, 1.0 / LEVELS, ZERO_POINT, packed)
        return y

    return product


def _onednn_product(integers: Tensor, scale: Tensor) -> Product:
    packed = torch.ops.onednn.qlinear_prepack(integers, None)
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    kernel = torch.ops.onednn.qlinear_pointwise.default

    def product(x: Tensor) -> Tensor:
        levels = x.mul(LEVELS).round_().add_(ZERO_POINT).to(torch.uint8)
        y: Tensor = kernel(
            levels, 1.0 / LEVELS, ZERO_POINT, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y

    return product


class Int8Linear:
    """A row of zeros becomes NaN before the kernel, some finite integers in it, and zeros again by its scale: zero."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._product = make_product(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        peak = _peak(x)
        y = self._product(x / peak)
        return y.mul_(peak) if self._bias is None else torch.addcmul(self._bias, y, peak)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        peak = _peak(x)
        residual.addcmul_(self._product(x / peak), peak)
        if self._bias is not None:
            residual.add_(self._bias)


class Int8NormedLinear:
    """The gain is in the weight already."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        size = weight.shape[1]
        self._product = make_product(weight * size**0.5)
        self._bias = bias
        # max / sqrt(mean(x^2) + eps) = max sqrt(size) / hypot(norm(x), sqrt(size eps)); sqrt(size) is in the weight.
        self._least = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        peak = _peak(x)
        y = self._product(x / peak)
        peak /= torch.hypot(torch.linalg.vector_norm(x, 2, -1, keepdim=True), self._least)
        return y.mul_(peak) if self._bias is None else torch.addcmul(self._bias, y, peak)


class Int8Linears(CpuLinears):
    row_multiple = 1

    def __init__(self, *, may_rotate: bool = True) -> None:
        self._may_rotate = may_rotate
        self._rotations: dict[int, Tensor] = {}

    def _rotated(self, rows: Tensor) -> Tensor:
        """Rows of the width of the hidden states in their basis."""
        if not self._may_rotate:
            return rows
        size = rows.shape[-1]
        if size not in self._rotations:
            self._rotations[size] = rotation(size)
        return rows @ self._rotations[size]

    def embedding(self, weight: Tensor) -> Tensor:
        return self._rotated(weight)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_residual: bool = False) -> Int8Linear:
        if not is_residual:
            return Int8Linear(weight, bias)
        return Int8Linear(self._rotated(weight.T).T.contiguous(), None if bias is None else self._rotated(bias))

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Int8NormedLinear:
        return Int8NormedLinear(self._rotated(weight * gain), bias, eps)

    def router(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> "_PaddedNormedLinear":
        return _PaddedNormedLinear(Float32NormedLinear(torch.ones_like(gain), self._rotated(weight * gain), bias, eps))


class _PaddedNormedLinear:
    """A float32 product in steps whose rows are not padded."""

    def __init__(self, inner: Float32NormedLinear) -> None:
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(F.pad(x, (0, 0, 0, -len(x) % ROW_MULTIPLE)))[: len(x)]


def _peak(x: Tensor) -> Tensor:
    """The largest magnitude of each row, ``[rows, 1]``."""
    return x.abs().amax(-1, keepdim=True)
