"""The compiled kernels of the CPU against numpy and torch; what they mean for attention: tests/unit/engine."""

import os
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from core.handoff import DigestKind
from core.kv import KVGeometry, KVOrder
from engine.kernels.attention import exp, half_of
from engine.kernels.digest import compiled_wsum64
from engine.kernels.simd import KEYS, jit, keep_compiled_code, lanes, make_products
from kvtransfer.digest import Digester


@jit
def _each_exp(source, target):  # type: ignore[no-untyped-def]
    for index in range(len(source)):
        target[index] = exp(source[index])


@jit
def _each_half(source, target):  # type: ignore[no-untyped-def]
    for index in range(len(source)):
        target[index] = half_of(source[index])


def test_exp_is_that_of_double_precision_to_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-87, 0, 200_001), np.linspace(0, 88, 1001)]).astype(np.float32)
    y = np.empty_like(x)
    _each_exp(x, y)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_of_what_is_no_number_and_of_what_does_not_count() -> None:
    x = np.array([np.nan, -np.inf, -1e30, -87.5, 0.0], np.float32)
    y = np.empty_like(x)
    _each_exp(x, y)
    assert np.isnan(y[0]) and y[1:].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    special = [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFC00001, 0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000]
    x = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    y = np.empty(len(x), np.uint16)
    _each_half(x, y)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    got = torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(got.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


@pytest.mark.parametrize("size", [4, 8, 24, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("is_half", [False, True])
def test_products_with_a_tile(size: int, is_half: bool) -> None:
    products = make_products(size, is_half=is_half)
    fetch, score, weigh = products.fetch, products.score, products.weigh

    @jit
    def run(q, kv, tile, scores, weights, out):  # type: ignore[no-untyped-def]
        for key in range(KEYS):
            at = kv.ctypes.data + key * kv.strides[0]
            fetch(at, tile.ctypes.data + key * tile.strides[0], at)
        score(q.ctypes.data, tile.ctypes.data, scores.ctypes.data)
        weigh(weights.ctypes.data, tile.ctypes.data, out.ctypes.data)

    generator = np.random.default_rng(size)
    q, weights, out = (generator.standard_normal(n, np.float32) for n in (size, KEYS, size))
    values = torch.from_numpy(generator.standard_normal((KEYS, size), np.float32))
    if is_half:
        values = values.to(torch.bfloat16)
    kv = (values.view(torch.uint16) if is_half else values).numpy()
    tile, scores, before = np.empty((KEYS, size), np.float32), np.empty(KEYS, np.float32), out.copy()
    run(q, kv, tile, scores, weights, out)
    exact = values.double().numpy()
    assert np.array_equal(tile, exact.astype(np.float32))
    assert np.allclose(scores, exact @ q.astype(np.float64), atol=1e-4)
    assert np.allclose(out, before + weights.astype(np.float64) @ exact, atol=1e-4)
    assert size % lanes(size) == 0
    kv = np.repeat(kv[:1], KEYS, axis=0)
    run(q, kv, tile, scores, weights, out)
    assert (scores == scores[0]).all(), "a sum does not depend on the key's place in the tile"


def test_compiled_code_is_kept_for_these_very_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)  # given back afterwards
    places = []
    for source in ("a = 1", "a = 2"):
        (tmp_path / "kernel.py").write_text(source)
        assert keep_compiled_code(tmp_path)
        places.append(numba.config.CACHE_DIR)
    assert places[0] != places[1]
    assert all(Path(place).parent == tmp_path / "__pycache__" for place in places)


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image whose files belong to another user: numba would refuse to compile at all."""
    before = numba.config.CACHE_DIR
    (tmp_path / "__pycache__").touch()
    assert not keep_compiled_code(tmp_path)
    (tmp_path / "__pycache__").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert not keep_compiled_code(tmp_path)
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("dtype_bytes", [1, 2, 4])
def test_the_compiled_digest_is_that_of_numpy(order: KVOrder, dtype_bytes: int) -> None:
    """Also where the kernel does not fit the memory: another order, heads that are no whole words."""
    geometry = KVGeometry(
        num_blocks=7, block_size=3, num_layers=2, num_kv_heads=3, head_dim=5, dtype_bytes=dtype_bytes, order=order
    )
    kv = np.random.default_rng(dtype_bytes).integers(0, 256, geometry.num_bytes + 8, dtype=np.uint8)[:-8]
    compiled = Digester(DigestKind.WSUM64, geometry, kv, sums=compiled_wsum64())
    for blocks in ([], [6], [3, 3, 0, 5]):
        assert compiled.digest(blocks) == Digester(DigestKind.WSUM64, geometry, kv).digest(blocks)
    for blocks in ([7], [0, -8]):
        with pytest.raises(IndexError):
            compiled.digest(blocks)
