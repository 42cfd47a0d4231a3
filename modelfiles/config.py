"""The facts of a model that every process needs, in one shape whatever file format they came from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from modelfiles.errors import ModelFileError
from modelfiles.families import FAMILIES, Family

RopeScalingKind = Literal["linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. Fields that a kind does not use keep their default."""

    kind: RopeScalingKind
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_context: int = 0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Of cos and sin."""
    factors: tuple[float, ...] = ()
    """Each frequency's own divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A router picks `num_per_token` of `num_experts` small MLPs for each token, in the layers of `layers`."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalises_weights: bool
    """The chosen experts' weights are scaled to sum to one."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder. `vocab_size` is the embedding's, padding included."""

    architecture: str
    """The name of its family."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    """q, k and v projections carry a bias (the output projection has one where its tensor is in the files)."""
    mlp_bias: bool
    sliding_window: int | None
    """Tokens that a layer of `sliding_layers` sees, its own included."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sliding_layers: tuple[int, ...] = ()
    rope_local_theta: float | None = None
    """Of the layers with a window, where they have a base of their own; it is not scaled."""
    query_scalar: float | None = None
    """Scores are divided by the root of this; None: of `head_dim`."""
    experts: ExpertsConfig | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of K, or of V."""
        return self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Tokens that the layer sees, or None for all."""
        return self.sliding_window if layer in self.sliding_layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling values of generation_config.json; None where the file is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def or_else(self, other: GenerationDefaults) -> GenerationDefaults:
        """These values, and those of ``other`` where these are silent."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(other, **{name: value for name, value in mine.items() if value is not None})


def check_config(config: ModelConfig, path: str) -> None:
    """Refuses sizes no decoder can have, so that a wrong file fails here and not in a kernel."""
    sizes = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "sliding_window": 1 if config.sliding_window is None else config.sliding_window,
    }
    if config.experts is not None:
        sizes |= {
            "num_experts": config.experts.num_experts,
            "num_experts_per_tok": config.experts.num_per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
        }
        if config.experts.num_per_token > config.experts.num_experts:
            raise ModelFileError(path, "num_experts_per_tok exceeds num_experts", "use a complete model")
    for name, value in sizes.items():
        if value < 1:
            raise ModelFileError(path, f"{name} is {value}", "use a complete model")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            path, f"{config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads", "use a complete model"
        )
    if config.head_dim % 2:
        raise ModelFileError(path, f"head_dim {config.head_dim} is odd and cannot be rotated", "use a complete model")
    if config.rope_theta <= 0 or (config.rope_local_theta is not None and config.rope_local_theta <= 0):
        raise ModelFileError(path, "a rotary base is not positive", "use a complete model")
    if not all(0 <= one < config.vocab_size for one in config.eos_token_ids):
        raise ModelFileError(path, "an EOS token id lies outside the vocabulary", "use a complete model")
