"""Which part of the model a rank holds, and which ranks another one reads. Pure.

A rank holds a box: some KV heads times some layers. What it reads from a source rank is the intersection of their
boxes. Where there are more source ranks than KV heads, several hold the same heads; a destination reads one of them,
chosen by its own rank, so that the copies share the load.

``num_kv_heads`` are always all KV heads of the model (``KVFormat.num_kv_heads``): counting with those of one rank is
how peers came to read heads that are not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import LayoutMismatch
from core.kv import KVGeometry, kv_head_range, ranks_with_kv_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Heads and layers by their number in the model."""

    heads: range
    layers: range

    @property
    def is_empty(self) -> bool:
        return not (self.heads and self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRanks:
    """What a destination rank does with the ranks of a source, by their place in the list."""

    read: tuple[int, ...]
    unread: tuple[int, ...]
    """Nothing is read from them. Their leases are released all the same: each rank holds one."""

    @property
    def to_release(self) -> tuple[int, ...]:
        return tuple(sorted(self.read + self.unread))


def held_box(geometry: KVGeometry, num_kv_heads: int) -> Box:
    """What a rank holds. Raises LayoutMismatch when its number of heads is not that of its rank."""
    if not 0 <= geometry.rank < geometry.num_ranks:
        raise LayoutMismatch(f"rank {geometry.rank} of {geometry.num_ranks} ranks does not exist")
    heads = kv_head_range(geometry.rank, geometry.num_ranks, num_kv_heads)
    if len(heads) != geometry.num_kv_heads:
        raise LayoutMismatch(
            f"num_kv_heads: rank {geometry.rank} of {geometry.num_ranks} holds {len(heads)} of the model's "
            f"{num_kv_heads} KV heads, its geometry says {geometry.num_kv_heads}"
        )
    return Box(heads=heads, layers=range(geometry.first_layer, geometry.first_layer + geometry.num_layers))


def shared_box(source: KVGeometry, target: KVGeometry, num_kv_heads: int) -> Box:
    """What ``target`` reads from ``source``: what both hold, and no other copy is chosen for."""
    ours, theirs = held_box(target, num_kv_heads), held_box(source, num_kv_heads)
    heads = _overlap(ours.heads, theirs.heads)
    if heads:
        copies = ranks_with_kv_head(heads[0], source.num_ranks, num_kv_heads)
        if copies[target.rank % len(copies)] != source.rank:
            heads = range(0)
    return Box(heads=heads, layers=_overlap(ours.layers, theirs.layers))


def choose_sources(sources: Sequence[KVGeometry], target: KVGeometry, num_kv_heads: int) -> SourceRanks:
    """Which of a source's ranks (of every pipeline stage) ``target`` reads.

    Raises LayoutMismatch unless they hold everything that the target holds, each part once.
    """
    ours = held_box(target, num_kv_heads)
    times = np.zeros((len(ours.heads), len(ours.layers)), dtype=np.int64)
    read: list[int] = []
    for index, source in enumerate(sources):
        box = shared_box(source, target, num_kv_heads)
        if not box.is_empty:
            read.append(index)
            head, layer = box.heads.start - ours.heads.start, box.layers.start - ours.layers.start
            times[head : head + len(box.heads), layer : layer + len(box.layers)] += 1
    wrong = np.argwhere(times != 1)
    if len(wrong):
        head, layer = wrong[0]
        how = "no rank of the source" if times[head, layer] == 0 else "more than one rank of the source"
        raise LayoutMismatch(
            f"{how} gives rank {target.rank} of {target.num_ranks} its layer {ours.layers[layer]} "
            f"of KV head {ours.heads[head]}"
        )
    return SourceRanks(read=tuple(read), unread=tuple(index for index in range(len(sources)) if index not in read))


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
