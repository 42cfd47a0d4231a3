"""A Llama of a few thousand random weights: every path of the engine in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from modelfiles.config import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=101,
    max_context=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    sliding_window=None,
    eos_token_ids=(2,),
    bos_token_id=1,
)


class _Digest:
    digest = "tiny"


class _Tokenizer(_Digest):
    """A token from 32 up is the ASCII character of its number; those below are special."""

    def is_special(self, token_id: int) -> bool:
        return token_id < 32

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    @property
    def ordinary_texts(self) -> dict[int, str]:
        return {token_id: chr(token_id) for token_id in range(32, 101)}


class RandomLlama:
    """Answers what the engine asks of `modelfiles.model.ModelFiles`. `weights` may be edited before they are read."""

    name = "tiny"
    path = "tiny-model"
    digest = "tiny"

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        self.config = replace(TINY, **changes)
        config, random = self.config, np.random.default_rng(seed)
        hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.self_attn.q_proj.weight": (config.num_heads * config.head_dim, hidden),
                f"{layer}.self_attn.k_proj.weight": (kv, hidden),
                f"{layer}.self_attn.v_proj.weight": (kv, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, config.num_heads * config.head_dim),
                f"{layer}.mlp.gate_proj.weight": (config.intermediate_size, hidden),
                f"{layer}.mlp.up_proj.weight": (config.intermediate_size, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, config.intermediate_size),
            }
            if config.attention_bias:
                shapes |= {
                    f"{layer}.self_attn.q_proj.bias": (config.num_heads * config.head_dim,),
                    f"{layer}.self_attn.k_proj.bias": (kv,),
                    f"{layer}.self_attn.v_proj.bias": (kv,),
                }
            if config.architecture == "qwen3":
                shapes |= {f"{layer}.self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
        self.weights = {name: (random.standard_normal(shape) * 0.4).astype("float32") for name, shape in shapes.items()}

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def file_of(self, name: str) -> str:
        return self.path

    def load_tensor(self, name: str) -> np.ndarray[Any, Any]:
        return self.weights[name]

    def tokenizer(self) -> _Tokenizer:
        return _Tokenizer()

    def chat_template(self) -> _Digest | None:
        return None
