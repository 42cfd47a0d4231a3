"""Small random models of every supported family, made and saved by `transformers`: config and tensors as published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.tiny_tokenizer import rust_tokenizer

VOCAB_SIZE = 288
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _llama(**changes: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**{**SHAPE, **changes})


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _mixture(**changes: Any) -> PreTrainedConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32}
    return transformers.Qwen3MoeConfig(**{**SHAPE, **experts, "norm_topk_prob": True, **changes})


def _gemma3(**changes: Any) -> PreTrainedConfig:
    shape = {**SHAPE, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 24}
    return transformers.Gemma3TextConfig(**{**shape, **changes})


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "llama, tied, biases": lambda: _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama, linear": lambda: _llama(**_rope("linear", factor=4.0)),
    "llama, llama3": lambda: _llama(
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "llama, yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama, yarn with scales": lambda: _llama(
        **_rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.8,
            mscale_all_dim=0.5,
        )
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=20),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen2, window above layer 1": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=17, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "qwen3_moe": _mixture,
    "qwen3_moe, a dense layer, plain weights": lambda: _mixture(mlp_only_layers=[1], norm_topk_prob=False),
    "gemma3": _gemma3,
    "gemma3, 27b's scale and scaling": lambda: _gemma3(
        query_pre_attn_scalar=21,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    folder: Path
    reference: PreTrainedModel


def write_family(name: str, folder: Path) -> TinyModel:
    """A model whose every tensor matters, in several shards."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * 0.15)
    model.save_pretrained(folder, max_shard_size="60KB")
    rust_tokenizer().save(str(folder / "tokenizer.json"))
    return TinyModel(folder=folder, reference=model)
