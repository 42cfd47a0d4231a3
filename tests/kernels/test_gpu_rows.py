"""The kernels of a GPU that work row by row, against plain torch: norms, gates, rotation, digests, masks, penalties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.gpu.activation import Activation, gated, gated_twin
from engine.kernels.gpu.digest import wsum64, wsum64_twin
from engine.kernels.gpu.linear import linear, linear_twin
from engine.kernels.gpu.norm import MAX_COLUMNS, rms_norm, rms_norm_twin
from engine.kernels.gpu.rotary import append, append_twin
from engine.kernels.gpu.shaping import SEEN, forbid, forbid_twin, penalise, penalise_twin
from kvtransfer.digest import wsum64 as digest_of_ranges
from tests.kernels.gpu import DEVICE, DTYPES, assert_close, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 131), (2, 2560)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(shape: tuple[int, int], dtype: torch.dtype, has_residual: bool) -> None:
    x, gain = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    residual = random(*shape, dtype=dtype, seed=2) if has_residual else None
    expected_residual = None if residual is None else residual.clone()
    out = rms_norm(x, gain, 1e-5, residual)
    assert_close(out, rms_norm_twin(x, gain, 1e-5, expected_residual))
    if residual is not None and expected_residual is not None:
        assert torch.equal(residual, expected_residual)


def test_norm_refuses_what_no_program_can_hold() -> None:
    with pytest.raises(ValueError, match="takes up to"):
        rms_norm(torch.zeros(1, MAX_COLUMNS + 1), torch.zeros(MAX_COLUMNS + 1), 1e-5)
    with pytest.raises(ValueError, match=r"gain has shape \(3,\), wanted \(4,\)"):
        rms_norm(torch.zeros(1, 4), torch.zeros(3), 1e-5)
    with pytest.raises(ValueError, match="stride"):
        rms_norm(torch.zeros(4, 4).T, torch.zeros(4), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 8, 8), (1, 1, 1), (17, 65, 70), (3, 130, 64)])
@pytest.mark.parametrize("adds", [False, True])
def test_product(rows: int, inputs: int, outputs: int, adds: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype) / 8, random(outputs, inputs, dtype=dtype, seed=1)
    bias = None if adds else random(outputs, dtype=dtype, seed=2)
    residual = random(rows, outputs, dtype=dtype, seed=3) if adds else None
    expected = linear_twin(x, weight, bias, None if residual is None else residual.clone())
    out = linear(x, weight, bias, residual)
    assert_close(out, expected)
    assert residual is None or out is residual


def test_a_product_of_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(37, 200), random(70, 200, seed=1)
    whole = linear(x, weight, None)
    for first, end in ((0, 1), (1, 18), (18, 37)):
        assert torch.equal(linear(x[first:end], weight, None), whole[first:end])


def test_a_product_of_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3, 5\), wanted \(None, 4\)"):
        linear(torch.zeros(1, 4), torch.zeros(3, 5), None)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy; the gate is 0 there
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 70), (2, 4100)], ids=str)
def test_gate(shape: tuple[int, int], activation: Activation, dtype: torch.dtype) -> None:
    gate_up = random(*shape, dtype=dtype) * 3
    assert_close(gated(gate_up, activation), gated_twin(gate_up, activation))


def test_a_gate_without_its_up_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        gated(torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
def test_append(head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    check_append(num_query_heads=3, num_kv_heads=2, head_dim=head_dim, dtype=dtype, has_norm=has_norm)


@pytest.mark.parametrize("group", range(1, 9))
def test_append_finds_its_kv_head(group: int) -> None:
    check_append(num_query_heads=2 * group, num_kv_heads=2, head_dim=16, num_rows=2)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_append_of_a_row_or_none(num_rows: int) -> None:
    check_append(num_query_heads=2, num_kv_heads=1, head_dim=64, num_rows=num_rows)


def check_append(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = True,
    num_rows: int = 4,
) -> None:
    """The first slot of a block, the last one of the cache, the first one, and a row of padding."""
    block_size = 16
    qkv = random(num_rows, num_query_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    kv = torch.zeros(9, num_kv_heads, 3, 2, block_size, head_dim, dtype=dtype, device=DEVICE)
    angles = random(50, head_dim // 2)
    cos = torch.cat([angles.cos(), angles.cos()], -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    gains = random(2, head_dim, dtype=dtype, seed=3) if has_norm else None
    positions = torch.tensor([0, 15, 49, 7], dtype=torch.int32, device=DEVICE)[:num_rows]
    slots = torch.tensor([16, 143, 0, -1], dtype=torch.int64, device=DEVICE)[:num_rows]
    expected_qkv, expected_kv = qkv.clone(), kv.clone()
    append(qkv, gains, cos, sin, positions, slots, kv, 1, 1e-6)
    append_twin(expected_qkv, gains, cos, sin, positions, slots, expected_kv, 1, 1e-6)
    assert_close(qkv[:, :num_query_heads], expected_qkv[:, :num_query_heads])
    assert_close(kv, expected_kv)


def test_append_refuses_a_layer_that_is_not_there() -> None:
    qkv, kv, table = torch.zeros(1, 3, 4), torch.zeros(2, 1, 2, 2, 16, 4), torch.zeros(5, 4)
    row = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no layer 2"):
        append(qkv, None, table, table, row, row, kv, 2)
    with pytest.raises(ValueError, match="more than 2 heads"):
        append(qkv[:, :2], None, table, table, row, row, kv, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_are_those_of_the_hand_off(dtype: torch.dtype) -> None:
    kv = random(5, 2, 3, 2, 16, 28, dtype=dtype)
    blocks = torch.tensor([4, 0, 4, 2], dtype=torch.int32, device=DEVICE)
    digests = wsum64(kv, blocks)
    assert torch.equal(digests, wsum64_twin(kv, blocks))
    ranges = kv.cpu()[4].reshape(2, -1).view(torch.uint8).numpy()
    assert (digests[0].cpu().numpy().view(np.uint64) == digest_of_ranges(ranges)).all()
    assert wsum64(kv, blocks[:0]).shape == (0, 2)


def test_digests_want_whole_words() -> None:
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        wsum64(torch.zeros(1, 1, 1, 2, 1, 3, dtype=torch.float16), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 2050])
def test_masks(vocab_size: int) -> None:
    scores = random(3, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (3, -(-vocab_size // 32))
    allowed = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32).to(DEVICE)
    is_masked = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    expected = scores.clone()
    forbid(scores, allowed, is_masked)
    forbid_twin(expected, allowed, is_masked)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("vocab_size", [1, 2050])
def test_penalties(vocab_size: int) -> None:
    scores = random(4, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    counts = torch.randint(0, 3, (6, vocab_size), generator=generator, dtype=torch.int32)
    counts += (torch.rand(6, vocab_size, generator=generator) < 0.2).int() * SEEN
    options = [torch.tensor(x, device=DEVICE) for x in ([1, 1.5, 1, 1.2], [0, 0, 0.5, 0.5], [0, 0, 0.25, -0.5])]
    places = torch.tensor([0, 5, 5, 2], device=DEVICE)
    expected = scores.clone()
    penalise(scores, counts.to(DEVICE), places, *(x.float() for x in options))
    penalise_twin(expected, counts.to(DEVICE), places, *(x.float() for x in options))
    assert_close(scores, expected)
    assert torch.equal(scores[0], expected[0])


def test_options_of_no_row_do_nothing() -> None:
    scores = random(0, 40)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    forbid(scores, torch.zeros(0, 2, dtype=torch.int32, device=DEVICE), none)
    counts = torch.zeros(1, 40, dtype=torch.int32, device=DEVICE)
    penalise(scores, counts, none, *(torch.zeros(0, device=DEVICE) for _ in range(3)))
