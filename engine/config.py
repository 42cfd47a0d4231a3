"""What may be chosen of an engine, and what it comes to on this machine with these files."""

import os
from dataclasses import dataclass
from typing import Literal

from core.costs import StepCosts
from core.errors import ConfigError
from core.kv import KVFormat
from engine.device import Device, resolve_device
from engine.dtypes import quantisation_of, resolve_dtypes
from engine.kv_cache import KVShape, num_blocks_for
from engine.mock import as_mock
from engine.scheduler import Policy
from modelfiles.model import ModelFiles

AUTO_MEMORY_BYTES = 2 << 30
AUTO_MEMORY_DIVISOR = 8
MEASURED = 0
"""As a number of blocks: it is found once the weights are on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What may be chosen. ``auto`` is resolved at start and then found in :class:`EngineLimits`."""

    block_size: int = 16
    num_blocks: int | Literal["auto"] = "auto"
    memory_bytes: int | Literal["auto"] = "auto"
    """Of the KV cache, when ``num_blocks`` is ``auto``. ``auto`` on CPU: 2 GiB, at most an eighth of the machine's
    memory; on a GPU: what ``memory_fraction`` leaves."""
    memory_fraction: float = 0.9
    """Of a GPU's memory: what all that runs there may take (:mod:`engine.gpu_memory`)."""
    max_step_tokens: int = 2048
    max_sequences: int = 64
    max_context: int | Literal["auto"] = "auto"
    """``auto``: what the model was trained for."""
    device: str = "cpu"
    """cpu, cuda, or interpreter (:mod:`engine.device`)."""
    dtype: str = "auto"
    """Of weights and arithmetic; what a device has: :mod:`engine.dtypes`."""
    kv_dtype: str = "auto"
    """``auto``: as docs/measurements.md found it best beside ``dtype``."""
    invariant: bool = True
    """Law 3 bitwise: rows of a step are padded so that none depends on the others."""
    prefix_cache: bool = True
    """Keep complete blocks for their content, and share them."""
    prefault: bool = False
    """Touch the KV cache's memory beside the steps, from the start on (engine/prefault.py)."""
    policy: Policy = "fcfs"
    max_mixed_tokens: int = 256
    """Prompt tokens of a step in which answers advance too: what a prompt may add to the time between two tokens."""
    projected_tokens: int = 64
    """Room for so many more tokens of each running sequence is kept free when others start."""
    costs: StepCosts | None = None
    """Mock execution with these (:mod:`engine.mock`): no weights, small KV, and as many blocks as with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Facts learnt at start."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_context: int
    vocab_size: int
    max_sequences: int
    max_step_tokens: int
    device: Device = Device.CPU
    is_mock: bool = False
    """No model is run."""


def resolve(files: ModelFiles, config: EngineConfig) -> tuple[KVFormat, KVShape, EngineLimits]:
    """Replace every ``auto``. Raises :class:`ConfigError` where the choices cannot work, with the remedy."""
    model = files.config
    device = Device.CPU if config.costs is not None else resolve_device(config.device)
    dtype, kv_dtype = resolve_dtypes(config.dtype, config.kv_dtype, device)
    max_context = model.max_context if config.max_context == "auto" else config.max_context
    if max_context > model.max_context:
        raise ConfigError(
            f"models[].max_context is {max_context}, {files.path} was made for {model.max_context}: lower it"
        )
    if config.max_sequences > config.max_step_tokens:
        raise ConfigError(
            f"max_sequences ({config.max_sequences}) exceeds max_step_tokens ({config.max_step_tokens}): "
            "a step has one token for every running sequence; raise max_step_tokens or lower max_sequences"
        )
    shape = KVShape(
        block_size=config.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
    )
    num_blocks = config.num_blocks
    if num_blocks == "auto" and device is Device.CUDA and config.memory_bytes == "auto":
        num_blocks = MEASURED
    elif num_blocks == "auto":
        memory_bytes = _auto_memory_bytes() if config.memory_bytes == "auto" else config.memory_bytes
        num_blocks = num_blocks_for(shape, memory_bytes=memory_bytes, min_tokens=max_context)
    template = files.chat_template()
    kv_format = KVFormat(
        model_digest=files.digest,
        tokenizer_digest=files.tokenizer().digest,
        template_digest="" if template is None else template.digest,
        compute_dtype=dtype,
        kv_dtype=kv_dtype,
        quantisation=quantisation_of(dtype),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    if config.costs is not None:
        kv_format, shape = as_mock(kv_format, shape)
    limits = EngineLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=shape.block_bytes,
        max_context=max_context,
        vocab_size=model.vocab_size,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        device=device,
        is_mock=config.costs is not None,
    )
    return kv_format, shape, limits


def _auto_memory_bytes() -> int:
    return min(AUTO_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // AUTO_MEMORY_DIVISOR)
