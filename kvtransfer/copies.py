"""Copies between two regions, held as one array: planning, checking and posting never loop over them. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

_Int = NDArray[np.int64]


class Copy(NamedTuple):
    """``num_bytes`` bytes from ``remote_offset`` of the peer's region to ``local_offset`` of ours."""

    remote_offset: int
    local_offset: int
    num_bytes: int


class Copies(Sequence[Copy]):
    """Rows of (remote offset, local offset, bytes). Reads like a tuple of :class:`Copy`."""

    __slots__ = ("array",)

    def __init__(self, array: _Int) -> None:
        self.array = array

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> "Copies":
        """The same, without work where it is one already."""
        return copies if isinstance(copies, Copies) else cls(np.array(copies, dtype=np.int64).reshape(-1, 3))

    @property
    def num_bytes(self) -> int:
        return int(self.array[:, 2].sum())

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Copy]:
        return map(Copy._make, self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> "Copies": ...
    def __getitem__(self, index: int | slice) -> "Copy | Copies":
        rows = self.array[index]
        return Copies(rows) if isinstance(index, slice) else Copy._make(rows.tolist())


def merge(runs: _Int) -> _Int:
    """Join rows that continue the row before them on both sides. Expects them sorted by remote offset."""
    remote, local, num_bytes = runs.T
    follows = (remote[1:] == (remote + num_bytes)[:-1]) & (local[1:] == (local + num_bytes)[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    merged = runs[heads]
    merged[:, 2] = np.add.reduceat(num_bytes, heads)
    return merged


def cut(runs: _Int, *, max_chunk_bytes: int, unit_bytes: int) -> tuple[Copies, ...]:
    """Chunks of at most ``max_chunk_bytes``, in the order of ``runs`` (not empty). Where every run is made of units,
    and a unit fits into a chunk, no unit is cut."""
    if max_chunk_bytes < 1:
        raise ValueError("max_chunk_bytes must be positive")
    limit = max_chunk_bytes - max_chunk_bytes % unit_bytes if unit_bytes <= max_chunk_bytes else max_chunk_bytes
    ends = np.cumsum(runs[:, 2])
    total = int(ends[-1])
    if total <= limit:
        return (Copies(runs),)
    # The bytes of all runs in a row, cut where a run ends and where a chunk does.
    limits = np.arange(limit, total, limit)
    edges = np.sort(np.concatenate((ends, limits)))
    edges = edges[np.diff(edges, prepend=0) > 0]
    starts = np.concatenate(([0], edges[:-1]))
    owner = np.searchsorted(ends, starts, side="right")
    inside = starts - (ends[owner] - runs[owner, 2])
    pieces = np.stack((runs[owner, 0] + inside, runs[owner, 1] + inside, edges - starts), axis=1)
    bounds = [0, *np.searchsorted(starts, limits).tolist(), len(pieces)]
    return tuple(Copies(pieces[begin:end]) for begin, end in pairwise(bounds))
