"""KV memory that a CPU cannot address, for those who digest and check blocks: the sums are made where the blocks are.

Safe from any thread: the work goes to a stream of its own, beside the steps. The caller knows that the blocks are
complete: a step's writes have ended when it was told of the step, and a transfer's when its operation was done.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.gpu.digest import wsum64
from engine.kernels.gpu.launch import one_at_a_time
from engine.kv_cache import KVCache


class DeviceMemory:
    """Of one worker. Implements :class:`kvtransfer.device_digest.BlockMemory`."""

    def __init__(self, cache: KVCache) -> None:
        self._kv = cache.tensor
        self._block_bytes = cache.geometry.block_bytes
        self._local = threading.local()

    def sums(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """``wsum64`` of each kv head of each block, ``[block, kv_head]``."""
        with self._beside():
            made = wsum64(self._kv, torch.tensor(blocks, dtype=torch.int64).to(self._kv.device)).cpu()
        return made.numpy().view(np.uint64)

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The blocks' bytes, ``[block, byte]``."""
        with self._beside():
            index = torch.tensor(blocks, dtype=torch.int64).to(self._kv.device)
            copied = self._kv.view(len(self._kv), -1).view(torch.uint8)[index].cpu()
        return copied.numpy().reshape(len(blocks), self._block_bytes)

    def _beside(self) -> AbstractContextManager[object]:
        """A stream of this thread; where kernels are interpreted, nobody else's turn."""
        if self._kv.device.type != "cuda":
            return one_at_a_time()
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self._kv.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)
