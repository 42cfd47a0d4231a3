"""The attention of one step, as the decoder sees it: where the step's rows find their keys is settled once for all
layers. :mod:`engine.model.attention_cpu` and :mod:`engine.model.attention_gpu` implement it.

Legend: T rows of the step, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model.rope import RopeTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``num_tokens`` consecutive tokens of one sequence from position ``start``; their rows follow each other in the
    step.
    """

    block_table: Sequence[int]
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """The norm of each head of q and k before they are rotated."""

    gains_2D: Tensor
    """Of q, then of k."""
    eps: float


class AttentionPlan(Protocol):
    """Index arrays of one step."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        out_THD: Tensor,
        *,
        norm: QkNorm | None = None,
        window: int | None = None,
    ) -> None:
        """Norm and rotate q and k of ``qkv [T, H + 2 K, D]``, store K and V of the step's rows, and write
        ``out = softmax(q K^T / sqrt(D)) V`` over each row's context: with a ``window`` over its own key and the
        ``window - 1`` before it. ``qkv`` is overwritten; padding rows of ``out`` are left alone.
        """
