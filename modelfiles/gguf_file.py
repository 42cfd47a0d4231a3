"""Reads GGUF files: metadata, config and tensors, given back in Hugging Face's names and layout.

llama.cpp's converter stores the rows of q_proj and k_proj of Llama models in another order (pairs of a rotation side
by side) than Hugging Face (the two halves of a head one after the other). `load` undoes that, so rotary embedding by
halves is right for both formats.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import gguf
import numpy as np

from modelfiles.config import GenerationDefaults, ModelConfig, check_config
from modelfiles.errors import ModelFileError
from modelfiles.gguf_header import TensorInfo, read_header
from modelfiles.tensors import Array

REMEDY = "download the file again"
ROWS_PERMUTED = ("llama", "mistral")
SUPPORTED_ARCHITECTURES = ("llama", "qwen2")

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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
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
        self._tensors = {self._hugging_face_name(tensor.name): tensor for tensor in header.tensors}

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

    def load(self, name: str) -> Array:
        """The tensor as float32, shape [out, in] for matrices."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(str(self.path), f"tensor '{name}' is missing", "use a complete model")
        array = self._dequantise(tensor)
        if self._architecture() in ROWS_PERMUTED:
            if ".q_proj." in name:
                array = _unpermute_rows(array, self.integer(f"{self._architecture()}.attention.head_count"))
            elif ".k_proj." in name:
                array = _unpermute_rows(array, self._num_kv_heads())
        return array

    def _dequantise(self, tensor: TensorInfo) -> Array:
        raw = np.frombuffer(self._content[tensor.offset : tensor.offset + tensor.num_bytes], dtype=np.uint8)
        # The quantisers want a tensor's own dimensions, the last one in bytes.
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            array: Array = gguf.quants.dequantize(rows, tensor.kind)
        except NotImplementedError:
            raise ModelFileError(
                str(self.path), f"quantisation {tensor.kind.name} is not supported", "use another quantisation"
            ) from None
        return array.astype(np.float32, copy=False).reshape(tensor.shape)

    def _hugging_face_name(self, name: str) -> str:
        if name in _WHOLE_NAMES:
            return _WHOLE_NAMES[name]
        match = _LAYER.fullmatch(name)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        raise ModelFileError(
            str(self.path),
            f"tensor '{name}' is not one of a Llama-family decoder",
            "use the model's Hugging Face folder",
        )

    # --- config ---------------------------------------------------------------------------------------------------

    def _architecture(self) -> str:
        architecture = self.value("general.architecture")
        if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelFileError(
                str(self.path),
                f"architecture {architecture!r} is not supported",
                f"use one of: {', '.join(SUPPORTED_ARCHITECTURES)}",
            )
        return architecture

    def _num_kv_heads(self) -> int:
        architecture = self._architecture()
        num_heads = self.integer(f"{architecture}.attention.head_count")
        return self.integer(f"{architecture}.attention.head_count_kv", num_heads)

    def config(self) -> ModelConfig:
        architecture = self._architecture()
        if self.value(f"{architecture}.rope.scaling.type") not in (None, "none"):
            raise ModelFileError(
                str(self.path), "rope scaling in GGUF is not supported", "use the model's Hugging Face folder"
            )
        num_heads = self.integer(f"{architecture}.attention.head_count")
        hidden_size = self.integer(f"{architecture}.embedding_length")
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelFileError(str(self.path), "has no token embedding", "use a complete GGUF file")
        bos = self.value("tokenizer.ggml.bos_token_id")
        eos = {self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        config = ModelConfig(
            architecture=architecture,
            num_layers=self.integer(f"{architecture}.block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self._num_kv_heads(),
            head_dim=self.integer(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1)),
            intermediate_size=self.integer(f"{architecture}.feed_forward_length"),
            vocab_size=embedding.shape[0],
            max_context=self.integer(f"{architecture}.context_length"),
            rms_norm_eps=self.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
            rope_theta=self.number(f"{architecture}.rope.freq_base", 10000.0),
            rope_scaling=None,
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._tensors,
            sliding_window=None,
            eos_token_ids=tuple(sorted(one for one in eos if isinstance(one, int))),
            bos_token_id=bos if isinstance(bos, int) else None,
        )
        check_config(config, str(self.path))
        if f"model.layers.{config.num_layers - 1}.input_layernorm.weight" not in self._tensors:
            raise ModelFileError(str(self.path), "lacks layers that its metadata announces", REMEDY)
        return config

    def generation_defaults(self) -> GenerationDefaults:
        """GGUF files carry no generation_config.json."""
        return GenerationDefaults()


def _unpermute_rows(array: Array, num_heads: int) -> Array:
    """[num_heads * head_dim, ...] from rotation pairs side by side to the two halves of each head."""
    head_dim = array.shape[0] // num_heads
    paired = array.reshape(num_heads, head_dim // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(array.shape)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be read ({error.strerror})", "check the path and its rights") from None
    except ValueError:
        raise ModelFileError(str(path), "is empty", REMEDY) from None
