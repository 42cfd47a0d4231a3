"""The decoder of all families: pre-norm RMSNorm, rotary attention, gated MLP; what differs is in ``Family``.

On CPU and GPU: products (:mod:`engine.model.linear`) and attention come from elsewhere. Fused q/k/v and gate/up
products; the head runs on the rows that are sampled only. Layers with a sliding window keep the KV of the whole context
like the others.

Legend: T rows of the step (padded), H query heads, K kv heads, D head_dim, V vocabulary, R sampled rows (padded).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import Device
from engine.model.attention import AttentionPlan, QkNorm
from engine.model.linear import Linear, Linears, NormedLinear, make_linears
from engine.model.mlp import Experts, GatedMLP
from engine.model.rope import RopeTables, rope_tables
from engine.model.weights import WeightReader, Weights
from modelfiles.config import ExpertsConfig, ModelConfig
from modelfiles.model import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: NormedLinear
    qk_norm: QkNorm | None
    attention_out: Linear
    attention_post_gain: Tensor | None
    mlp: Linear
    """Norm and MLP."""
    mlp_post_gain: Tensor | None
    window: int | None


class Decoder:
    """The weights and one forward pass. Holds no progress: KV lives in the cache, sequences in the engine."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        max_context: int,
        dtype: str = "float32",
        device: Device = Device.CPU,
        invariant: bool = True,
        weights: Weights | None = None,
    ) -> None:
        """``invariant``: as :func:`engine.model.linear.make_linears` has it. ``weights`` in the place of those in the
        files."""
        reader = weights or WeightReader(files)
        self.config = config = files.config
        self.dtype, self.device = dtype, device
        self._linears = make_linears(
            dtype, device, may_rotate=not files.config.family.has_post_norms, invariant=invariant
        )
        read = _LayerReader(config, reader, self._linears)
        hidden, head_dim = config.hidden_size, config.head_dim
        embedding = reader.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
        self._embedding = self._linears.embedding(embedding)
        self._embedding_scale = hidden**0.5 if config.family.scales_embedding else None
        self._layers = [read.layer(index) for index in range(config.num_layers)]
        norm = read.gain("model.norm", hidden)
        is_tied = config.tie_word_embeddings or not reader.has("lm_head.weight")
        head, head_bias = (embedding, None) if is_tied else reader.fused({"lm_head": config.vocab_size}, hidden)
        self._head = self._linears.normed(norm, head, head_bias, config.rms_norm_eps)
        reader.check_all_read("lm_head.weight")  # a tied head may be in the files too
        place = self._linears.device
        self._rope = rope_tables(head_dim, config.rope_theta, config.rope_scaling, max_context, place)
        self._local_rope = self._rope
        if config.rope_local_theta is not None and config.sliding_layers:
            self._local_rope = rope_tables(head_dim, config.rope_local_theta, None, max_context, place)

    @property
    def row_multiple(self) -> int:
        """Of the rows of a step and of :meth:`logits`, for law 3 bitwise."""
        return self._linears.row_multiple

    def forward(self, tokens_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states ``[T, hidden]`` before the last norm; KV of the plan's rows is written on the way."""
        x = F.embedding(tokens_T, self._embedding)
        if self._embedding_scale is not None:
            x.mul_(self._embedding_scale)
        attended_THD = x.new_zeros(len(tokens_T), self.config.num_heads, self.config.head_dim)
        for index, layer in enumerate(self._layers):
            self._attend(index, layer, x, plan, attended_THD)
            self._add(x, layer.attention_out, attended_THD.view(len(tokens_T), -1), layer.attention_post_gain)
            self._add(x, layer.mlp, x, layer.mlp_post_gain)
        return x

    def compile(self, plan: AttentionPlan) -> None:
        """Have what is compiled at its first use compiled now; ``plan`` has no rows."""
        config = self.config
        row = torch.zeros(config.head_dim, dtype=self._linears.dtype, device=self._linears.device)
        qkv = row.repeat(1, config.num_heads + 2 * config.num_kv_heads, 1)
        plan.attend(0, qkv, self._rope, row.repeat(1, config.num_heads, 1))

    def logits(self, hidden_R: Tensor, out_RV: Tensor | None = None) -> Tensor:
        """Scores ``[R, V]`` of rows of :meth:`forward`'s result in float32; into ``out_RV`` where it is given."""
        scores = self._head(hidden_R)
        return scores.float() if out_RV is None else out_RV.copy_(scores)

    def _attend(self, index: int, layer: _Layer, x: Tensor, plan: AttentionPlan, out_THD: Tensor) -> None:
        config = self.config
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        rope: RopeTables = self._rope if layer.window is None else self._local_rope
        plan.attend(index, qkv, rope, out_THD, norm=layer.qk_norm, window=layer.window)

    def _add(self, residual: Tensor, layer: Linear, x: Tensor, post_gain: Tensor | None) -> None:
        if post_gain is None:
            layer.add_to(residual, x)
        else:
            residual.add_(F.rms_norm(layer(x), post_gain.shape, post_gain, self.config.rms_norm_eps))


class _LayerReader:
    """Makes layers out of the tensors of a model."""

    def __init__(self, config: ModelConfig, reader: Weights, linears: Linears) -> None:
        self._config, self._reader, self._linears = config, reader, linears

    def gain(self, name: str, size: int) -> Tensor:
        """What a norm multiplies with."""
        return self._reader.tensor(f"{name}.weight", size).add_(self._config.family.gain_offset)

    def layer(self, index: int) -> _Layer:
        config, reader, linears = self._config, self._reader, self._linears
        family = config.family
        name, hidden = f"model.layers.{index}", config.hidden_size
        attention, has_post_norms = f"{name}.self_attn", family.has_post_norms
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        qkv = {f"{attention}.{part}": size for part, size in sizes.items()}
        mlp_norm = f"{name}.pre_feedforward_layernorm" if has_post_norms else f"{name}.post_attention_layernorm"
        return _Layer(
            qkv=linears.normed(
                self.gain(f"{name}.input_layernorm", hidden),
                *reader.fused(qkv, hidden, has_bias=config.attention_bias),
                config.rms_norm_eps,
            ),
            qk_norm=self._qk_norm(attention) if family.has_qk_norm else None,
            attention_out=linears.linear(
                *reader.fused({f"{attention}.o_proj": hidden}, config.q_size), is_residual=True
            ),
            attention_post_gain=self._post_gain(f"{name}.post_attention_layernorm") if has_post_norms else None,
            mlp=self._mlp(index, self.gain(mlp_norm, hidden)),
            mlp_post_gain=self._post_gain(f"{name}.post_feedforward_layernorm") if has_post_norms else None,
            window=config.window_of(index),
        )

    def _post_gain(self, name: str) -> Tensor:
        return self._linears.vector(self.gain(name, self._config.hidden_size))

    def _qk_norm(self, attention: str) -> QkNorm:
        config = self._config
        q, k = (self.gain(f"{attention}.{part}_norm", config.head_dim) for part in "qk")
        if config.query_scalar is not None:
            # Attention divides by the root of head_dim.
            q.mul_((config.head_dim / config.query_scalar) ** 0.5)
        return QkNorm(gains_2D=self._linears.vector(torch.stack([q, k])), eps=config.rms_norm_eps)

    def _mlp(self, index: int, gain: Tensor) -> Linear:
        config, name = self._config, f"model.layers.{index}.mlp"
        if config.experts is None or index not in config.experts.layers:
            return self._gated_mlp(name, gain, config.intermediate_size)
        return self._experts(name, gain, config.experts)

    def _gated_mlp(self, name: str, gain: Tensor, inner: int) -> GatedMLP:
        hidden, has_bias = self._config.hidden_size, self._config.mlp_bias
        gate_up = self._reader.fused({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, has_bias=has_bias)
        down = self._reader.fused({f"{name}.down_proj": hidden}, inner, has_bias=has_bias)
        return GatedMLP(
            self._linears.normed(gain, *gate_up, self._config.rms_norm_eps),
            self._linears.linear(*down, is_residual=True),
            self._linears.gate(self._config.family.activation),
        )

    def _experts(self, name: str, gain: Tensor, experts: ExpertsConfig) -> Experts:
        router = self._reader.fused({f"{name}.gate": experts.num_experts}, self._config.hidden_size)
        return Experts(
            self._linears.router(gain, *router, self._config.rms_norm_eps),
            [
                self._gated_mlp(f"{name}.experts.{expert}", gain, experts.intermediate_size)
                for expert in range(experts.num_experts)
            ],
            num_per_token=experts.num_per_token,
            normalises_weights=experts.normalises_weights,
        )
