"""The facts of a model that every process needs, in one shape whatever file format they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from modelfiles.errors import ModelFileError

RopeScalingKind = Literal["linear", "llama3"]

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2")
"""Llama-family decoders: pre-norm RMSNorm, RoPE by halves, gated SiLU MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. The llama3 fields are 0.0 / 0 for `linear`."""

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder. `vocab_size` is the embedding's, padding included."""

    architecture: str
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
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


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


class JsonFile:
    """Typed reads from one JSON object; every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelFileError(
                str(path), f"cannot be read ({error.strerror})", "check the path and its rights"
            ) from None
        except ValueError:
            raise ModelFileError(str(path), "is not valid JSON", "download the file again") from None
        if not isinstance(value, dict):
            raise ModelFileError(str(path), "is not a JSON object", "download the file again")
        self.values: Mapping[str, object] = value

    def _wrong(self, key: str, wanted: str) -> ModelFileError:
        return ModelFileError(
            str(self.path), f"'{key}' is missing or not {wanted}", "use a complete Hugging Face folder"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, object] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)


def config_from_folder(folder: Path) -> ModelConfig:
    """Reads config.json (and the EOS list of generation_config.json, which wins where both speak)."""
    file = JsonFile(folder / "config.json")
    architecture = file.values.get("model_type")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelFileError(
            str(file.path),
            f"model_type {architecture!r} is not supported",
            f"use one of: {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    assert isinstance(architecture, str)
    num_heads = file.integer("num_attention_heads")
    hidden_size = file.integer("hidden_size")
    rope_theta, rope_scaling = _rope(file)
    eos = file.token_ids("eos_token_id")
    generation_path = folder / "generation_config.json"
    if generation_path.exists():
        eos = JsonFile(generation_path).token_ids("eos_token_id") or eos
    uses_window = file.flag("use_sliding_window", architecture == "mistral")
    config = ModelConfig(
        architecture=architecture,
        num_layers=file.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", num_heads),
        head_dim=file.integer("head_dim", hidden_size // max(num_heads, 1)),
        intermediate_size=file.integer("intermediate_size"),
        vocab_size=file.integer("vocab_size"),
        max_context=file.integer("max_position_embeddings"),
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=file.flag("tie_word_embeddings", False),
        attention_bias=file.flag("attention_bias", architecture == "qwen2"),
        mlp_bias=file.flag("mlp_bias", False),
        sliding_window=file.optional_integer("sliding_window") if uses_window else None,
        eos_token_ids=eos,
        bos_token_id=file.optional_integer("bos_token_id"),
    )
    check_config(config, str(file.path))
    return config


def _rope(file: JsonFile) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters` that holds the two."""
    table = file.table("rope_parameters") or file.table("rope_scaling") or {}
    theta_value = table.get("rope_theta")
    theta = float(theta_value) if isinstance(theta_value, (int, float)) else file.number("rope_theta", 10000.0)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return theta, None

    def number(key: str) -> float:
        value = table.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(str(file.path), f"rope scaling lacks '{key}'", "use a complete Hugging Face folder")
        return float(value)

    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_context=int(number("original_max_position_embeddings")),
        )
    raise ModelFileError(
        str(file.path), f"rope scaling {kind!r} is not supported", "use a model with linear or llama3 scaling"
    )


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
    }
    for name, value in sizes.items():
        if value < 1:
            raise ModelFileError(path, f"{name} is {value}", "use a complete model")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            path, f"{config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads", "use a complete model"
        )
    if not all(0 <= one < config.vocab_size for one in config.eos_token_ids):
        raise ModelFileError(path, "an EOS token id lies outside the vocabulary", "use a complete model")


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
