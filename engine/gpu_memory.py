"""How many KV blocks a GPU has room for: what a share of its memory leaves beside everything else.

The sum is made once, at the start, with the weights in place and after a pass of the largest step, so that nothing of
it is guessed but the reserve. The error says all of it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import ConfigError
from engine.kv_cache import KVShape

if TYPE_CHECKING:
    from engine.model.decoder import Decoder

RESERVE_BYTES = 512 << 20
"""For graphs, workspaces of libraries and what an allocator cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes of one device."""

    total: int
    others: int
    """Of other processes, and of the driver."""
    weights: int
    step: int
    """The most that a step holds beside weights and KV."""
    reserve: int = RESERVE_BYTES

    def left(self, fraction: float) -> int:
        """For KV, when all of us may take this share of the device. Negative when the rest does not fit."""
        return int(self.total * fraction) - self.others - self.weights - self.step - self.reserve

    def explain(self, fraction: float) -> str:
        parts = (
            f"{_gib(self.total)} of memory x {fraction} (kv.memory_fraction) - {_gib(self.others)} of other processes "
            f"and the driver - {_gib(self.weights)} of weights - {_gib(self.step)} of the largest step - "
            f"{_gib(self.reserve)} in reserve"
        )
        return f"{parts} = {_gib(self.left(fraction))} for KV"


def blocks_within(memory: GpuMemory, fraction: float, shape: KVShape, *, min_tokens: int) -> int:
    """Raises :class:`ConfigError` when they cannot hold one sequence of ``min_tokens``, with the sum."""
    num_blocks = max(0, memory.left(fraction)) // shape.block_bytes
    needed = -(-min_tokens // shape.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"the GPU has no room for one sequence of {min_tokens} tokens ({_gib(needed * shape.block_bytes)}): "
            f"{memory.explain(fraction)}; raise kv.memory_fraction, lower max_context or max_step_tokens, end "
            "other processes, or take a smaller model or a larger GPU"
        )
    return num_blocks


def measure(model: "Decoder", *, max_step_tokens: int, max_sequences: int) -> GpuMemory:
    """With the weights in place; runs the products of the largest step once."""
    import torch

    from engine.model.attention import QkNorm
    from engine.model.rope import RopeTables

    class Nothing:
        """Attention holds next to nothing of its own."""

        def attend(
            self,
            layer: int,
            qkv: torch.Tensor,
            rope: RopeTables,
            out_THD: torch.Tensor,
            *,
            norm: QkNorm | None = None,
            window: int | None = None,
        ) -> None:
            out_THD.copy_(qkv[:, : out_THD.shape[1]])

    device = model.device.torch
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        hidden = model.forward(torch.zeros(max_step_tokens, dtype=torch.int64, device=device), Nothing())
        # Scores are held twice: by the graphs, and by a step with prompts.
        scores = [model.logits(hidden[:max_sequences]) for _ in range(2)]
        torch.cuda.synchronize(device)
        del hidden, scores
    step = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return GpuMemory(total=total, others=others, weights=weights, step=step)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
