"""Memory that this package owns and registers: aligned buffers, and the scratch cells that slot reads land in.

Addresses stay valid as long as the owning object lives. Registered memory must outlive every peer that holds its
metadata (measured: reads still succeed after deregistration, and reading unmapped memory over TCP kills its *owner*).
"""

import ctypes
from collections import deque

import numpy as np
from numpy.typing import NDArray

from core.kv import MemoryRegion

CELL_BYTES = 64
"""One cache line: size of a lease slot and of a scratch cell."""

REGION_KV = "kv"
"""All blocks of a worker, in block order."""
REGION_SLOTS = "slots"
"""P's lease slots, read one-sidedly by D."""
REGION_SCRATCH = "scratch"
"""D's cells in which slot snapshots land."""
REGION_CANARY = "canary"
"""P's pattern that readers check before they use a link."""
REGION_LANDING = "landing"
"""D's cells in which canaries land."""


def view_memory(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """Bytes at ``address`` as a writable array. The caller guarantees that they stay mapped while the view is used."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class AlignedBuffer:
    """Zeroed memory whose address is a multiple of ``alignment``."""

    def __init__(self, num_bytes: int, *, alignment: int = 4096) -> None:
        self._raw = np.zeros(num_bytes + alignment, dtype=np.uint8)
        skip = -self._raw.ctypes.data % alignment
        self.data: NDArray[np.uint8] = self._raw[skip : skip + num_bytes]

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def region(self, name: str) -> MemoryRegion:
        return MemoryRegion(name=name, address=self.address, num_bytes=self.data.nbytes)


class Scratch:
    """A fixed number of cells, one for each fetch (or handshake) in flight. Used by the transfer thread only."""

    def __init__(self, num_cells: int = 256, *, cell_bytes: int = CELL_BYTES, name: str = REGION_SCRATCH) -> None:
        self._buffer = AlignedBuffer(num_cells * cell_bytes)
        self._free = deque(range(num_cells))
        self._name = name
        self.cell_bytes = cell_bytes
        self.num_cells = num_cells

    def region(self) -> MemoryRegion:
        return self._buffer.region(self._name)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A zeroed cell, or None when all are in use."""
        if not self._free:
            return None
        cell = self._free.popleft()
        self.view(cell)[:] = 0
        return cell

    def free(self, cell: int) -> None:
        """Only when no operation can write to the cell any more."""
        self._free.append(cell)

    def read(self, cell: int) -> bytes:
        return self.view(cell).tobytes()

    def view(self, cell: int) -> NDArray[np.uint8]:
        return self._buffer.data[cell * self.cell_bytes : (cell + 1) * self.cell_bytes]
