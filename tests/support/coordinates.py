"""KV memory by logical coordinates, made with numpy's reshape and transpose: knows nothing of strides or plans."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from core.kv import KVGeometry, kv_head_range

T = TypeVar("T", bound=np.generic)

LOGICAL = ("block", "kv_head", "layer", "kv", "slot", "head_dim")


def cells(geometry: KVGeometry, memory: NDArray[T]) -> NDArray[T]:
    """A view of one rank's memory (one item for each byte) as [block, kv_head, layer, kv, slot, head_dim, byte]."""
    sizes = {
        "block": geometry.num_blocks,
        "kv_head": geometry.num_kv_heads,
        "layer": geometry.num_layers,
        "kv": 2,
        "slot": geometry.block_size,
        "head_dim": geometry.head_dim,
    }
    order = geometry.order.value.split(",")
    by_order = memory.reshape([sizes[name] for name in order] + [geometry.dtype_bytes])
    return by_order.transpose([order.index(name) for name in LOGICAL] + [6])


def rank_of(geometry: KVGeometry, rank: int, num_ranks: int, num_kv_heads: int) -> KVGeometry:
    """One tensor-parallel rank of a model with ``num_kv_heads`` KV heads in all."""
    num_held = len(kv_head_range(rank, num_ranks, num_kv_heads))
    return replace(geometry, rank=rank, num_ranks=num_ranks, num_kv_heads=num_held)
