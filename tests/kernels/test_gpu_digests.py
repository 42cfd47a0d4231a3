"""Digests of blocks in a device's memory are those that a CPU makes of the same bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.handoff import DigestKind
from core.kv import KVGeometry
from engine.device import Device
from engine.device_memory import DeviceMemory
from engine.kv_cache import KVCache, KVShape
from kvtransfer.device_digest import DeviceDigester
from kvtransfer.digest import Digester
from kvtransfer.plan import Blocks
from tests.kernels.gpu import DEVICE

SHAPE = KVShape(block_size=8, num_layers=2, num_kv_heads=3, head_dim=4, dtype="float16")


@pytest.fixture
def cache() -> KVCache:
    made = KVCache(SHAPE, 6, Device.CUDA if DEVICE.type == "cuda" else Device.INTERPRETER)
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return made


def on_cpu(kind: DigestKind, cache: KVCache) -> Digester:
    return Digester(kind, cache.geometry, cache.tensor.cpu().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("kind", DigestKind)
@pytest.mark.parametrize("blocks", [[], [5], [4, 0, 4, 2]], ids=str)
def test_they_are_equal(kind: DigestKind, blocks: list[int], cache: KVCache) -> None:
    made = DeviceDigester(kind, cache.geometry, DeviceMemory(cache)).digest(blocks)
    assert made == on_cpu(kind, cache).digest(blocks)


def test_one_changed_bit_shows(cache: KVCache) -> None:
    digester = DeviceDigester(DigestKind.WSUM64, cache.geometry, DeviceMemory(cache))
    before = digester.digest([1, 2])
    cache.tensor.view(torch.int16)[2, 2, 1, 1, 7, 3] ^= 1
    after = digester.digest([1, 2])
    assert before[:-8] == after[:-8] and before[-8:] != after[-8:], "of its block and head alone"


@pytest.mark.parametrize("size", [4, 16])
def test_they_are_made_in_the_units_of_a_peer_with_other_blocks(size: int, cache: KVCache) -> None:
    source: KVGeometry = replace(cache.geometry, block_size=size)
    local = Blocks(geometry=cache.geometry, block_ids=(3, 5, 0, 1), first_block=2)
    units = range(16 // size, 48 // size)
    options = {"num_kv_heads": 3, "source_heads": range(3)}
    made = DeviceDigester(DigestKind.WSUM64, cache.geometry, DeviceMemory(cache)).digest_as(
        source, local, units, **options
    )
    assert made == on_cpu(DigestKind.WSUM64, cache).digest_as(source, local, units, **options)
    assert len(made) == len(units) * 3 * 8


def test_a_block_that_is_not_there_is_refused(cache: KVCache) -> None:
    with pytest.raises(IndexError, match="not all among the 6"):
        DeviceDigester(DigestKind.WSUM64, cache.geometry, DeviceMemory(cache)).digest([6])
