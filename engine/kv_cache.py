"""The KV memory of one worker: one tensor, block-major, head next (design.md 4).

``[block, kv_head, layer, k/v, slot, head_dim]``: a block of all layers is one contiguous range, a head of a block
too, and a tile ``[slot, head_dim]`` is what attention loads.
"""

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.errors import ConfigError
from core.kv import DTYPE_BYTES, KVGeometry, MemoryRegion
from engine.device import Device
from engine.prefault import Prefault

KV_REGION = "kv"
"""The name under which the region is advertised to peers."""

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What fixes the size of a block."""

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.block_size * per_token


def num_blocks_for(shape: KVShape, *, memory_bytes: int, min_tokens: int) -> int:
    """Blocks that fit into ``memory_bytes``. Raises when they cannot hold one sequence of ``min_tokens``."""
    num_blocks = memory_bytes // shape.block_bytes
    needed = -(-min_tokens // shape.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"models[].kv: {memory_bytes} bytes hold {num_blocks} KV blocks, one sequence of {min_tokens} tokens needs "
            f"{needed}: set memory_bytes to {needed * shape.block_bytes} or more, or lower max_context"
        )
    return num_blocks


class KVCache:
    """Owns the memory. It starts as zeros; on CPU it is touched page by page as blocks are first written, or before."""

    def __init__(self, shape: KVShape, num_blocks: int, device: Device = Device.CPU) -> None:
        self.device = device
        self.prefault: Prefault | None = None
        """Of a CPU's memory; not started."""
        self.geometry = KVGeometry(
            num_blocks=num_blocks,
            block_size=shape.block_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype_bytes=DTYPE_BYTES[shape.dtype],
        )
        assert self.geometry.block_bytes == shape.block_bytes
        sizes = (num_blocks, shape.num_kv_heads, shape.num_layers, 2, shape.block_size, shape.head_dim)
        if device is Device.CUDA:
            self.tensor = self._on_gpu(sizes, TORCH_DTYPES[shape.dtype])
        else:
            self.tensor = self._on_cpu(num_blocks * shape.block_bytes, TORCH_DTYPES[shape.dtype]).view(sizes)
        self.region = MemoryRegion(
            name=KV_REGION,
            address=self.tensor.data_ptr(),
            num_bytes=num_blocks * shape.block_bytes,
            device=str(self.tensor.device),
        )

    @property
    def array(self) -> npt.NDArray[np.float32 | np.uint16]:
        """The memory of a CPU for compiled code; bfloat16 as its bits."""
        is_half = self.tensor.dtype == torch.bfloat16
        return (self.tensor.view(torch.uint16) if is_half else self.tensor).numpy()

    def _on_gpu(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(sizes, dtype=dtype, device=self.device.torch)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"the GPU has {free} of {total} bytes free, {sizes[0]} KV blocks need {self.geometry.num_bytes}; "
                "lower models[].kv.memory_bytes or num_blocks"
            ) from None

    def _on_cpu(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        # An anonymous mapping is page-aligned, zero, and costs nothing until it is touched; torch.zeros would touch
        # it all.
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot have {num_bytes} bytes for {self.geometry.num_blocks} KV blocks ({error}); "
                "lower models[].kv.memory_bytes or num_blocks"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._memory, dtype=dtype)
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        self.prefault = Prefault(self._memory, memory.data_ptr())
        return memory

    def copy_block(self, source: int, target: int, num_slots: int) -> None:
        """Copy the first ``num_slots`` tokens of a block (it may be the target); the rest of the target becomes
        zero."""
        self.tensor[target, ..., :num_slots, :] = self.tensor[source, ..., :num_slots, :]
        self.tensor[target, ..., num_slots:, :] = 0
