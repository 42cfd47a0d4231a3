"""The promise under law 3 on this very machine: a row of a linear layer has the same bits in every company."""

from __future__ import annotations

import pytest
import torch

from engine.model import linear
from engine.model.linear import ROW_MULTIPLE, Linear

ROWS = (*range(ROW_MULTIPLE, 65, ROW_MULTIPLE), 72, 96, 128, 160, 252, 256, 320, 384, 508, 512)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (101, 32)])
def test_rows_do_not_depend_on_their_number_or_place(
    shape: tuple[int, int], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_packed and not linear.has_packed_kernel():
        pytest.skip("this torch has no packed kernel")
    monkeypatch.setattr(linear, "has_packed_kernel", lambda: is_packed)
    generator = torch.Generator().manual_seed(0)
    layer = Linear(torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator))
    x = torch.randn(512, shape[1], generator=generator)
    expected = layer(x)
    for number in ROWS:
        for first in {0, 3, 512 - number}:
            if first + number <= 512:
                rows = slice(first, first + number)
                assert torch.equal(layer(x[rows].contiguous()), expected[rows]), f"{number} rows from {first}"
