"""The canary: memory with a known content, read over a new link before anything of worth is.

P's pattern depends on its incarnation, so that a link that ends in the memory of an older process, or of another
worker, is seen. It is at least a block long: what a block needs (several frames, several descriptors) it needs too.
"""

import hashlib

import numpy as np

from core.ids import Incarnation
from core.kv import KVGeometry
from kvtransfer.layout import Region
from kvtransfer.memory import REGION_CANARY, REGION_LANDING, AlignedBuffer, Scratch

MIN_BYTES = 64 * 1024
"""Shorter reads are all latency: nothing could be said of the bandwidth."""
_CELLS = 8
"""Handshakes at the same time; more wait their turn."""


class CanaryMemory:
    """A worker's pattern, which peers read, and the cells in which it reads theirs. Kept mapped as long as the KV."""

    def __init__(self, incarnation: Incarnation, geometry: KVGeometry, *, min_bytes: int = MIN_BYTES) -> None:
        num_bytes = max(min_bytes, geometry.block_bytes)
        self._pattern = AlignedBuffer(num_bytes)
        self._pattern.data[:] = np.random.default_rng(incarnation).integers(0, 256, num_bytes, dtype=np.uint8)
        self.digest = hash_canary(self._pattern.data.data)
        self.landing = Scratch(_CELLS, cell_bytes=num_bytes, name=REGION_LANDING)

    def regions(self) -> tuple[Region, ...]:
        """To be registered with every backend."""
        return (Region(memory=self._pattern.region(REGION_CANARY)), Region(memory=self.landing.region()))

    def spoil(self) -> None:
        """Fault injection: what peers read is not what was announced any more."""
        self._pattern.data[0] ^= 1


def hash_canary(*parts: bytes | memoryview) -> bytes:
    """As in ``PeerInfo.canary_digest``."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
