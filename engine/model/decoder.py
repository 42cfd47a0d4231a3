"""The Llama-family decoder: pre-norm RMSNorm, rotary attention, gated SiLU (Llama, Mistral, Qwen2).

Plain torch on CPU in float32. Fused q/k/v and gate/up products; the head runs on the rows that are sampled only.
Legend: T rows of the step (padded), H query heads, K kv heads, D head_dim, V vocabulary, R sampled rows (padded).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigError
from engine.model.attention import AttentionPlan
from engine.model.linear import Linear, NormedLinear, make_linears
from engine.model.rope import rope_tables, rotate
from engine.model.weights import WeightReader
from modelfiles.model import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: NormedLinear
    attention_out: Linear
    gate_up: NormedLinear
    down: Linear


class Decoder:
    """The weights and one forward pass. Holds no progress: KV lives in the cache, sequences in the engine."""

    def __init__(self, files: ModelFiles, *, max_context: int, dtype: str = "float32") -> None:
        self.config = config = files.config
        if config.sliding_window is not None and config.sliding_window < max_context:
            raise ConfigError(
                f"{files.path}: attention with a sliding window of {config.sliding_window} tokens is not supported; "
                f"set models[].max_context to {config.sliding_window} or less"
            )
        self._linears = make_linears(dtype)
        reader = WeightReader(files)
        hidden, head_dim = config.hidden_size, config.head_dim
        self._q_size, self._kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._embedding = reader.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers = [self._read_layer(reader, f"model.layers.{index}") for index in range(config.num_layers)]
        norm = reader.tensor("model.norm.weight", hidden)
        if config.tie_word_embeddings or not reader.has("lm_head.weight"):
            head, head_bias = self._embedding, None
        else:
            head, head_bias = reader.fused({"lm_head": config.vocab_size}, hidden)
        self._head = self._linears.normed(norm, head, head_bias, config.rms_norm_eps)
        self._cos_C1D, self._sin_C1D = rope_tables(config, max_context)

    def _read_layer(self, reader: WeightReader, name: str) -> _Layer:
        hidden, inner, eps = self.config.hidden_size, self.config.intermediate_size, self.config.rms_norm_eps
        linears = self._linears
        attention = f"{name}.self_attn"
        qkv = {
            f"{attention}.q_proj": self._q_size,
            f"{attention}.k_proj": self._kv_size,
            f"{attention}.v_proj": self._kv_size,
        }
        return _Layer(
            qkv=linears.normed(
                reader.tensor(f"{name}.input_layernorm.weight", hidden), *reader.fused(qkv, hidden), eps
            ),
            attention_out=linears.linear(*reader.fused({f"{attention}.o_proj": hidden}, self._q_size)),
            gate_up=linears.normed(
                reader.tensor(f"{name}.post_attention_layernorm.weight", hidden),
                *reader.fused({f"{name}.mlp.gate_proj": inner, f"{name}.mlp.up_proj": inner}, hidden),
                eps,
            ),
            down=linears.linear(*reader.fused({f"{name}.mlp.down_proj": hidden}, inner)),
        )

    @property
    def row_multiple(self) -> int:
        """Of the rows of a step and of :meth:`logits`, for law 3 bitwise."""
        return self._linears.row_multiple

    def forward(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states ``[T, hidden]`` before the last norm; KV of the plan's rows is written on the way."""
        config = self.config
        num_rows, num_heads, num_kv_heads, head_dim = (
            len(tokens_T),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        cos_T1D, sin_T1D = self._cos_C1D[positions_T], self._sin_C1D[positions_T]
        x = F.embedding(tokens_T, self._embedding)
        attended_THD = torch.zeros(num_rows, num_heads, head_dim)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(x)
            qk_THD = qkv[:, : self._q_size + self._kv_size].view(num_rows, num_heads + num_kv_heads, head_dim)
            qk_THD.copy_(rotate(qk_THD, cos_T1D, sin_T1D))
            plan.write(index, qkv[:, self._q_size :].view(num_rows, 2, num_kv_heads, head_dim))
            plan.attend(index, qk_THD[:, :num_heads], attended_THD)
            layer.attention_out.add_to(x, attended_THD.view(num_rows, -1))
            gate_up = layer.gate_up(x)
            gate, up = gate_up.chunk(2, -1)
            layer.down.add_to(x, F.silu(gate).mul_(up))
        return x

    def logits(self, hidden_R: Tensor) -> Tensor:
        """Scores ``[R, V]`` of rows of :meth:`forward`'s result."""
        return self._head(hidden_R)
