"""The second half of a decoder layer: a gated MLP, or a router and many small ones (Qwen3-MoE).

Both take hidden states before their norm, as :class:`~engine.model.linear.NormedLinear` does, and are a
:class:`~engine.model.linear.Linear` to the decoder.

Legend: T rows, E experts, N chosen experts of a row.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import ROW_MULTIPLE, Linear, NormedLinear


class GatedMLP:
    """``down(activation(gate) * up)``; gate and up are one product."""

    def __init__(self, gate_up: NormedLinear, down: Linear, gate: Callable[[Tensor], Tensor]) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self._down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self._gate(self._gate_up(x))


class Experts:
    """The weighted sum of the MLPs that a router chooses for each row.

    The router's scores should be exact (float32): a small error chooses another expert. For law 3 a row's bits must not
    depend on who else chose its experts: equal scores go to the lower number, the rows of the router and of each
    expert are padded, and a row's sum runs from its lowest expert to its highest.
    """

    def __init__(
        self,
        router: NormedLinear,
        experts: Sequence[GatedMLP],
        *,
        num_per_token: int,
        normalises_weights: bool,
    ) -> None:
        self._router, self._experts = router, experts
        self._num_per_token = num_per_token
        self._normalises_weights = normalises_weights

    def __call__(self, x: Tensor) -> Tensor:
        scores_TE = self._router(F.pad(x, (0, 0, 0, -len(x) % ROW_MULTIPLE)))[: len(x)]
        ranked_TE = torch.softmax(scores_TE, -1).sort(stable=True, dim=-1, descending=True)
        weights_TN = ranked_TE.values[:, : self._num_per_token]
        chosen_TN = ranked_TE.indices[:, : self._num_per_token]
        if self._normalises_weights:
            weights_TN = weights_TN / weights_TN.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in sorted({*chosen_TN.flatten().tolist()}):
            rows, places = torch.where(chosen_TN == expert)
            padded_rows = F.pad(rows, (0, -len(rows) % ROW_MULTIPLE))
            y = self._experts[expert](x[padded_rows])[: len(rows)]
            out.index_add_(0, rows, y.mul_(weights_TN[rows, places, None]))
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))
