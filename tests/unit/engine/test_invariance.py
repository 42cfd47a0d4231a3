"""The promise under law 3 on this very machine: a row of a product has the same bits in every company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.model import linear_float32, linear_int8
from engine.model.linear import ROW_MULTIPLE, make_linears
from engine.model.linear_float32 import Float32Linear
from engine.model.rotation import rotation

ROWS = (*range(ROW_MULTIPLE, 65, ROW_MULTIPLE), 72, 96, 128, 160, 252, 256, 320, 384, 508, 512)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (101, 32)])
def test_rows_do_not_depend_on_their_number_or_place(
    shape: tuple[int, int], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_packed and not linear_float32.has_packed_kernel():
        pytest.skip("this torch has no packed kernel")
    monkeypatch.setattr(linear_float32, "has_packed_kernel", lambda: is_packed)
    generator = torch.Generator().manual_seed(0)
    layer = Float32Linear(torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator))
    x = torch.randn(512, shape[1], generator=generator)
    expected = layer(x)
    for number in ROWS:
        for first in {0, 3, 512 - number}:
            if first + number <= 512:
                rows = slice(first, first + number)
                assert torch.equal(layer(x[rows].contiguous()), expected[rows]), f"{number} rows from {first}"


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("kernel", ["preferred", "fallback"])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (4099, 576), (101, 32)])
def test_integer_products_need_no_padding(shape: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "fallback":
        monkeypatch.setattr(linear_int8, "has_fused_kernel", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=generator) * 0.05, torch.randn(shape[0], generator=generator)
    gain = torch.rand(shape[1], generator=generator) + 0.5
    x = torch.randn(320, shape[1], generator=generator) * torch.rand(320, 1, generator=generator).exp()
    linears = make_linears("int8")
    assert linears.row_multiple == 1
    for layer in (linears.linear(weight), linears.linear(weight, bias), linears.normed(gain, weight, bias, 1e-5)):
        expected = layer(x)
        for number in (*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257):
            for first in (3, 320 - number):
                if first + number <= 320:
                    rows = slice(first, first + number)
                    assert torch.equal(layer(x[rows].contiguous()), expected[rows]), f"{number} rows from {first}"


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 3e-2)])
def test_products_are_near_those_of_double_precision(dtype: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 160, generator=generator), torch.randn(96, generator=generator)
    gain, x = torch.rand(160, generator=generator) + 0.5, torch.randn(12, 160, generator=generator) * 3
    linears = make_linears(dtype, may_rotate=False)
    exact = x.double() @ weight.double().T
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
    for y, expected in (
        (linears.linear(weight.clone())(x), exact),
        (linears.linear(weight.clone(), bias)(x), exact + bias),
        (linears.normed(gain, weight.clone(), None, 1e-5)(x), normed @ weight.double().T),
        (linears.normed(gain, weight.clone(), bias, 1e-5)(x), normed @ weight.double().T + bias),
    ):
        assert (y - expected).norm() / expected.norm() < bound
    residual = torch.ones(12, 96)
    linears.linear(weight.clone(), bias).add_to(residual, x)
    assert (residual - 1 - exact - bias).norm() / exact.norm() < bound


@pytest.mark.parametrize("size", [8, 32, 48, 576, 7])
def test_rotated_hidden_states_give_the_same_products(size: int) -> None:
    turn = rotation(size)
    assert torch.allclose(turn.T @ turn, torch.eye(size), atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    table, weight = torch.randn(12, size, generator=generator), torch.randn(24, size, generator=generator)
    table[:, 3] *= 60  # a channel that towers above the others
    gain, inner = torch.rand(size, generator=generator) + 0.5, torch.randn(size, 24, generator=generator)
    x = torch.randn(12, 24, generator=generator)
    plain, turned = make_linears("float32"), make_linears("int8")
    hidden, turned_hidden = table.clone(), turned.embedding(table)
    plain.linear(inner.clone(), table[0], is_residual=True).add_to(hidden, x)
    turned.linear(inner.clone(), table[0], is_residual=True).add_to(turned_hidden, x)
    expected = plain.normed(gain, weight.clone(), None, 1e-5)(hidden)
    error = turned.normed(gain, weight.clone(), None, 1e-5)(turned_hidden) - expected
    assert error.norm() / expected.norm() < 0.03


def test_a_row_of_zeros_stays_one() -> None:
    linears, ones = make_linears("int8", may_rotate=False), torch.ones(8, 8)
    for linear in (linears.linear(ones), linears.normed(ones[0], ones, None, 1e-5)):
        assert torch.equal(linear(torch.zeros(3, 8)), torch.zeros(3, 8))
