"""Matrix products of a model, by dtype: :func:`make_linears` is the only way to them.

All take and return float32 rows; what they compute in is their own business. A row's result does not depend on the
other rows of the step when their number is a multiple of :attr:`Linears.row_multiple` (the ``invariant`` mode of law 3
on CPU; tests/unit/engine/test_invariance.py checks it on the machine at hand).
"""

from typing import Protocol

from torch import Tensor

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

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def normed(self, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> NormedLinear:
        """``gain`` is what the normalised row is multiplied with: families that store gain - 1 add the 1 first."""


def make_linears(dtype: str) -> Linears:
    """The products of a resolved dtype (never ``auto``)."""
    from engine.model.linear_bfloat16 import Bfloat16Linears
    from engine.model.linear_float32 import Float32Linears
    from engine.model.linear_int8 import Int8Linears

    makers: dict[str, type[Linears]] = {"float32": Float32Linears, "bfloat16": Bfloat16Linears, "int8": Int8Linears}
    return makers[dtype]()
