"""Reads the config files of a Hugging Face folder: config.json and generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from modelfiles.config import ExpertsConfig, GenerationDefaults, ModelConfig, RopeScaling, check_config
from modelfiles.errors import ModelFileError
from modelfiles.families import FAMILIES, Family, family_of
from modelfiles.json_file import JsonFile

REMEDY = "use a complete Hugging Face folder"
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Variants of a supported family that no model of it uses: refused, because ignoring one gives wrong answers."""


def config_from_folder(folder: Path) -> ModelConfig:
    """Reads config.json (and the EOS list of generation_config.json, which wins where both speak)."""
    file = JsonFile(folder / "config.json")
    family = family_of(file.values.get("model_type"), FAMILIES, str(file.path))
    _refuse_variants(file, family)
    num_layers = file.integer("num_hidden_layers")
    num_heads = file.integer("num_attention_heads")
    hidden_size = file.integer("hidden_size")
    max_context = file.integer("max_position_embeddings")
    rope_theta, rope_scaling, rope_local_theta = _rope(file, family, max_context)
    if rope_scaling is not None and rope_scaling.kind == "yarn":
        # Such a config may give the context before the stretching.
        max_context = max(max_context, int(rope_scaling.original_max_context * rope_scaling.factor))
    eos = file.token_ids("eos_token_id")
    generation_path = folder / "generation_config.json"
    if generation_path.exists():
        eos = JsonFile(generation_path).token_ids("eos_token_id") or eos
    sliding_window = file.optional_integer("sliding_window")
    sliding_layers = () if sliding_window is None else _sliding_layers(file, family, num_layers)
    config = ModelConfig(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", num_heads),
        head_dim=file.integer("head_dim", hidden_size // max(num_heads, 1)),
        intermediate_size=file.integer("intermediate_size"),
        vocab_size=file.integer("vocab_size"),
        max_context=max_context,
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rope_local_theta=rope_local_theta,
        tie_word_embeddings=file.flag("tie_word_embeddings", family.ties_embedding),
        attention_bias=file.flag("attention_bias", family.qkv_bias),
        mlp_bias=file.flag("mlp_bias", False),
        sliding_window=sliding_window if sliding_layers else None,
        sliding_layers=sliding_layers,
        query_scalar=file.optional_number("query_pre_attn_scalar"),
        experts=_experts(file, num_layers) if family.has_experts else None,
        eos_token_ids=eos,
        bos_token_id=file.optional_integer("bos_token_id"),
    )
    check_config(config, str(file.path))
    return config


def generation_defaults_from_folder(folder: Path) -> GenerationDefaults:
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    file = JsonFile(path)
    return GenerationDefaults(
        temperature=file.optional_number("temperature"),
        top_p=file.optional_number("top_p"),
        top_k=file.optional_integer("top_k"),
        min_p=file.optional_number("min_p"),
        repetition_penalty=file.optional_number("repetition_penalty"),
        max_new_tokens=file.optional_integer("max_new_tokens"),
    )


def _refuse_variants(file: JsonFile, family: Family) -> None:
    remedy = "use a model without it"
    keys = UNSUPPORTED if family.has_qk_norm else (*UNSUPPORTED, "query_pre_attn_scalar")
    for key in keys:
        if file.values.get(key):
            raise ModelFileError(str(file.path), f"{key} is not supported", remedy)
    for key in ("hidden_act", "hidden_activation"):
        name = file.values.get(key)
        if name is not None and name not in ACTIVATIONS[family.activation]:
            raise ModelFileError(str(file.path), f"{key} {name!r} is not supported for {family.name}", remedy)


def _sliding_layers(file: JsonFile, family: Family, num_layers: int) -> tuple[int, ...]:
    types = file.texts("layer_types")
    if types is None:
        return tuple(family.sliding_layers(file, num_layers))
    if len(types) != num_layers:
        raise ModelFileError(str(file.path), f"layer_types speaks of {len(types)} layers, not {num_layers}", REMEDY)
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelFileError(
                str(file.path), f"layer type {name!r} is not supported", "use full_attention and sliding_attention only"
            )
    return tuple(index for index, name in enumerate(types) if name == "sliding_attention")


def _experts(file: JsonFile, num_layers: int) -> ExpertsConfig:
    period, dense = file.integer("decoder_sparse_step", 1), file.integers("mlp_only_layers")
    if period < 1:
        raise ModelFileError(str(file.path), f"decoder_sparse_step is {period}", REMEDY)
    return ExpertsConfig(
        num_experts=file.integer("num_experts" if "num_experts" in file.values else "num_local_experts"),
        num_per_token=file.integer("num_experts_per_tok"),
        intermediate_size=file.integer("moe_intermediate_size"),
        normalises_weights=file.flag("norm_topk_prob", False),
        layers=tuple(index for index in range(num_layers) if index not in dense and (index + 1) % period == 0),
    )


def _rope(file: JsonFile, family: Family, max_context: int) -> tuple[float, RopeScaling | None, float | None]:
    """Base and scaling of full layers, base of layers with a window; in all spellings.

    `rope_theta` + `rope_scaling` (+ `rope_local_base_freq`), or the newer `rope_parameters` that holds them, for each
    layer type apart where the types differ.
    """
    newer = file.table("rope_parameters")
    local = file.number("rope_local_base_freq", family.rope_local_theta) if family.rope_local_theta else None
    if newer is not None and isinstance(newer.get("full_attention"), dict):
        per_type = _Rope(file, newer["full_attention"])
        sliding = newer.get("sliding_attention")
        if local is not None and isinstance(sliding, dict):
            local_rope = _Rope(file, sliding)
            local = local_rope.number("rope_theta", local)
            if local_rope.scaling(max_context) is not None:
                raise ModelFileError(str(file.path), "scaled rotation of sliding layers is not supported", REMEDY)
        return per_type.number("rope_theta", family.rope_theta), per_type.scaling(max_context), local
    table = _Rope(file, newer or file.table("rope_scaling") or {})
    theta = table.number("rope_theta", file.number("rope_theta", family.rope_theta))
    return theta, table.scaling(max_context), local


class _Rope:
    """One table of rotary parameters."""

    def __init__(self, file: JsonFile, table: object) -> None:
        assert isinstance(table, Mapping)
        self._path = str(file.path)
        self._table = table

    def number(self, key: str, default: float | None = None) -> float:
        value = self._table.get(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self._path, f"rope scaling lacks '{key}'", REMEDY)
        return float(value)

    def scaling(self, max_context: int) -> RopeScaling | None:
        kind = self._table.get("rope_type", self._table.get("type", "default"))
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelFileError(self._path, "partial rotation is not supported", "use a model without it")
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self.number("factor"))
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=self.number("factor"),
                low_freq_factor=self.number("low_freq_factor"),
                high_freq_factor=self.number("high_freq_factor"),
                original_max_context=int(self.number("original_max_position_embeddings")),
            )
        if kind == "yarn":
            original = int(self.number("original_max_position_embeddings", max_context))
            factor = self.number("factor", max_context / original)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_max_context=original,
                beta_fast=self.number("beta_fast", 32.0),
                beta_slow=self.number("beta_slow", 1.0),
                truncate=self._table.get("truncate") is not False,
                attention_factor=self.number("attention_factor", self._yarn_attention(factor)),
            )
        raise ModelFileError(
            self._path, f"rope scaling {kind!r} is not supported", "use a model with linear, llama3 or yarn scaling"
        )

    def _yarn_attention(self, factor: float) -> float:
        above, below = self._table.get("mscale"), self._table.get("mscale_all_dim")
        if above and below:
            return yarn_attention_factor(factor, self.number("mscale")) / yarn_attention_factor(
                factor, self.number("mscale_all_dim")
            )
        return yarn_attention_factor(factor)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's `sqrt(1/t)` (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
