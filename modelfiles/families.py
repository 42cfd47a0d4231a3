"""The supported families: one general decoder, and here the traits in which they differ.

A trait is what the name of an architecture says and its config.json does not. Whatever has a number is in
:class:`~modelfiles.config.ModelConfig`; nothing else in Baton asks for a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from modelfiles.errors import ModelFileError
from modelfiles.json_file import JsonFile

Activation = Literal["silu", "gelu_tanh"]

SlidingLayers = Callable[[JsonFile, int], Sequence[int]]
"""Which of so many layers see a window only, where config.json has no `layer_types`."""


def _none(file: JsonFile, num_layers: int) -> Sequence[int]:
    return ()


def _all(file: JsonFile, num_layers: int) -> Sequence[int]:
    return range(num_layers)


def _all_if_used(file: JsonFile, num_layers: int) -> Sequence[int]:
    return range(num_layers) if file.flag("use_sliding_window", False) else ()


def _upper_if_used(file: JsonFile, num_layers: int) -> Sequence[int]:
    first = file.integer("max_window_layers", 28)
    return range(first, num_layers) if file.flag("use_sliding_window", False) else ()


def _all_but_every_sixth(file: JsonFile, num_layers: int) -> Sequence[int]:
    return all_but_every(file.integer("sliding_window_pattern", 6), num_layers)


def all_but_every(period: int, num_layers: int) -> Sequence[int]:
    return [index for index in range(num_layers) if (index + 1) % period]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    """`model_type` of config.json."""
    gguf_name: str = ""
    """`general.architecture` of GGUF files; empty where only folders can be read."""
    gguf_permutes_rows: bool = False
    """llama.cpp's converter has put the rows of q_proj and k_proj in another order."""
    gain_offset: float = 0.0
    """Norms multiply by weight + offset. GGUF files store the sum."""
    qkv_bias: bool = False
    """Where config.json does not speak of it."""
    ties_embedding: bool = False
    """Where config.json does not speak of it."""
    has_qk_norm: bool = False
    """Each head of q and k is normalised before it is rotated."""
    has_post_norms: bool = False
    """What attention and MLP give is normalised before it is added to the residual."""
    scales_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    activation: Activation = "silu"
    has_experts: bool = False
    sliding_layers: SlidingLayers = _none
    rope_theta: float = 10_000.0
    """Where config.json does not say."""
    rope_local_theta: float | None = None
    """Of layers with a window, where they have a base of their own."""


LLAMA = Family(name="llama", gguf_name="llama", gguf_permutes_rows=True)
MISTRAL = Family(name="mistral", sliding_layers=_all)
QWEN2 = Family(name="qwen2", gguf_name="qwen2", qkv_bias=True, sliding_layers=_upper_if_used)
QWEN3 = Family(name="qwen3", gguf_name="qwen3", has_qk_norm=True, sliding_layers=_upper_if_used)
QWEN3_MOE = Family(name="qwen3_moe", has_qk_norm=True, has_experts=True, sliding_layers=_all_if_used)
GEMMA3 = Family(
    name="gemma3_text",
    gguf_name="gemma3",
    gain_offset=1.0,
    ties_embedding=True,
    has_qk_norm=True,
    has_post_norms=True,
    scales_embedding=True,
    activation="gelu_tanh",
    sliding_layers=_all_but_every_sixth,
    rope_theta=1_000_000.0,
    rope_local_theta=10_000.0,
)

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3)}
GGUF_FAMILIES = {family.gguf_name: family for family in FAMILIES.values() if family.gguf_name}


def family_of(name: object, known: dict[str, Family], path: str) -> Family:
    """Raises :class:`ModelFileError` with the supported ones."""
    family = known.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelFileError(path, f"architecture {name!r} is not supported", f"use one of: {', '.join(known)}")
    return family
