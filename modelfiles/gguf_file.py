"""Reads GGUF files: metadata, config and tensors, given back in Hugging Face's names and layout.

llama.cpp's converter stores the rows of q_proj and k_proj of Llama models in another order (pairs of a rotation side
by side) than Hugging Face (the two halves of a head one after the other). `load` undoes that, so rotary embedding by
halves is right for both formats. It also adds 1 to Gemma's norm weights; `load` takes it off again.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import gguf
import numpy as np

from modelfiles.config import GenerationDefaults, ModelConfig, RopeScaling, check_config
from modelfiles.errors import ModelFileError
from modelfiles.families import GGUF_FAMILIES, Family, all_but_every, family_of
from modelfiles.folder_config import yarn_attention_factor
from modelfiles.gguf_header import TensorInfo, read_header
from modelfiles.tensors import Array

REMEDY = "download the file again"
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how the converter writes Llama 3's scaling."""
END_OF_TURN_TEXTS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
"""Control tokens that end an answer even where the metadata do not say so (as llama.cpp has it)."""
CONTROL = 3

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class GGUFFile:
    """One open GGUF file (memory-mapped)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._content = memoryview(_map(path))
        header = read_header(path, self._content)
        self._values = header.values
        self._family: Family = family_of(self.value("general.architecture"), GGUF_FAMILIES, str(path))
        self._rope_factors = next((tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS), None)
        self._tensors = {
            self._hugging_face_name(tensor.name): tensor
            for tensor in header.tensors
            if tensor is not self._rope_factors
        }

    # --- metadata -------------------------------------------------------------------------------------------------

    def value(self, key: str) -> object:
        """The metadata value of `key`, or None where the file has none."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(
                str(self.path), f"metadata '{key}' is missing or not an integer", "use a complete GGUF file"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)):
            raise ModelFileError(
                str(self.path), f"metadata '{key}' is missing or not a number", "use a complete GGUF file"
            )
        # GGUF stores float32; its shortest decimal is the number the author wrote (1e-05, not 9.99999974e-06).
        return float(str(np.float32(value)))

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ModelFileError(
                str(self.path), f"metadata '{key}' is missing or no list of texts", "use a complete GGUF file"
            )
        return value

    # --- tensors --------------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def file_of(self, name: str) -> Path:
        return self.path

    def load(self, name: str) -> Array:
        """The tensor as float32, shape [out, in] for matrices."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(str(self.path), f"tensor '{name}' is missing", "use a complete model")
        array = self._dequantise(tensor)
        if name.endswith("norm.weight"):
            return array - np.float32(self._family.gain_offset) if self._family.gain_offset else array
        if self._family.gguf_permutes_rows and ".q_proj." in name:
            return self._unpermuted(name, array, self._num_heads())
        if self._family.gguf_permutes_rows and ".k_proj." in name:
            return self._unpermuted(name, array, self._num_kv_heads())
        return array

    def _unpermuted(self, name: str, array: Array, num_heads: int) -> Array:
        """From rotation pairs side by side to the two halves of each head."""
        if num_heads < 1 or array.shape[0] % (2 * num_heads):
            raise ModelFileError(
                str(self.path), f"tensor '{name}' has {array.shape[0]} rows for {num_heads} heads", REMEDY
            )
        paired = array.reshape(num_heads, -1, 2, *array.shape[1:])  # [heads, head_dim / 2, 2, ...]
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(array.shape)

    def _dequantise(self, tensor: TensorInfo) -> Array:
        raw = np.frombuffer(self._content[tensor.offset : tensor.offset + tensor.num_bytes], dtype=np.uint8)
        # The quantisers want a tensor's own dimensions, the last one in bytes.
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            array: Array = gguf.quants.dequantize(rows, tensor.kind)
        except NotImplementedError:
            raise ModelFileError(
                str(self.path),
                f"stores '{tensor.name}' as {tensor.kind.name}, which is not supported",
                "use another quantisation",
            ) from None
        return array.astype(np.float32, copy=False).reshape(tensor.shape)

    def _hugging_face_name(self, name: str) -> str:
        if name in _WHOLE_NAMES:
            return _WHOLE_NAMES[name]
        match = _LAYER.fullmatch(name)
        names = _LAYER_NAMES | (_POST_NORM_NAMES if self._family.has_post_norms else {})
        if match and match[2] in names:
            return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
        raise ModelFileError(
            str(self.path),
            f"tensor '{name}' is not one of a {self._family.gguf_name} decoder",
            "use the model's Hugging Face folder",
        )

    # --- config ---------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._family.gguf_name}.{name}"

    def _num_heads(self) -> int:
        return self.integer(self._key("attention.head_count"))

    def _num_kv_heads(self) -> int:
        return self.integer(self._key("attention.head_count_kv"), self._num_heads())

    def config(self) -> ModelConfig:
        family = self._family
        num_heads, num_layers = self._num_heads(), self.integer(self._key("block_count"))
        hidden_size = self.integer(self._key("embedding_length"))
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelFileError(str(self.path), "has no token embedding", "use a complete GGUF file")
        bos = self.value("tokenizer.ggml.bos_token_id")
        window, period = self.value(self._key("attention.sliding_window")), 0
        if family.rope_local_theta is not None and window is not None:
            period = self.integer(self._key("attention.sliding_window_pattern"), 6)
        config = ModelConfig(
            architecture=family.name,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self._num_kv_heads(),
            head_dim=self.integer(self._key("attention.key_length"), hidden_size // max(num_heads, 1)),
            intermediate_size=self.integer(self._key("feed_forward_length")),
            vocab_size=embedding.shape[0],
            max_context=self.integer(self._key("context_length")),
            rms_norm_eps=self.number(self._key("attention.layer_norm_rms_epsilon")),
            rope_theta=self.number(self._key("rope.freq_base"), family.rope_theta),
            rope_scaling=self._rope_scaling(),
            rope_local_theta=self._rope_local_theta(),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._tensors,
            sliding_window=self.integer(self._key("attention.sliding_window")) if period else None,
            sliding_layers=tuple(all_but_every(period, num_layers)) if period else (),
            query_scalar=self._query_scalar(num_layers, hidden_size, num_heads),
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=bos if isinstance(bos, int) else None,
        )
        check_config(config, str(self.path))
        if f"model.layers.{config.num_layers - 1}.input_layernorm.weight" not in self._tensors:
            raise ModelFileError(str(self.path), "lacks layers that its metadata announces", REMEDY)
        return config

    def _eos_token_ids(self) -> tuple[int, ...]:
        named = {self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        tokens, types = self.value("tokenizer.ggml.tokens"), self.value("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(types, list):
            named |= {
                tokens.index(text)
                for text in END_OF_TURN_TEXTS
                if text in tokens and types[tokens.index(text) : tokens.index(text) + 1] == [CONTROL]
            }
        return tuple(sorted(one for one in named if isinstance(one, int)))

    def _rope_local_theta(self) -> float | None:
        default = self._family.rope_local_theta
        return None if default is None else self.number(self._key("rope.freq_base_swa"), default)

    def _query_scalar(self, num_layers: int, hidden_size: int, num_heads: int) -> float | None:
        """The metadata lack it; of Gemma 3 one size has another than `head_dim`, known by its layers (as llama.cpp)."""
        is_gemma_27b = self._family.has_post_norms and num_layers == 62
        return hidden_size / num_heads if is_gemma_27b else None

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self.value(self._key("rope.scaling.type"))
        if self._rope_factors is not None:
            if kind not in (None, "none"):
                raise ModelFileError(
                    str(self.path), f"has rope scaling {kind!r} and rope factors", "use the model's Hugging Face folder"
                )
            return RopeScaling(kind="factors", factors=tuple(self._dequantise(self._rope_factors).ravel().tolist()))
        if kind in (None, "none"):
            return None
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self.number(self._key("rope.scaling.factor")))
        if kind == "yarn":
            factor = self.number(self._key("rope.scaling.factor"))
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_max_context=self.integer(self._key("rope.scaling.original_context_length")),
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=yarn_attention_factor(factor),
            )
        raise ModelFileError(
            str(self.path), f"rope scaling {kind!r} is not supported", "use the model's Hugging Face folder"
        )

    def generation_defaults(self) -> GenerationDefaults:
        """GGUF files carry no generation_config.json."""
        return GenerationDefaults()


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be read ({error.strerror})", "check the path and its rights") from None
    except ValueError:
        raise ModelFileError(str(path), "is empty", REMEDY) from None
