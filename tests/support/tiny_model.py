"""Writes a made-up Llama model to disk, as a Hugging Face folder and as a GGUF file with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.tiny_tokenizer import rust_tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MLP = 2, 32, 4, 2, 8, 64

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "intermediate_size": MLP,
    "vocab_size": rust_tokenizer().get_vocab_size(),
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
}

Weights = dict[str, np.ndarray]


def tiny_weights(seed: int = 0) -> Weights:
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    vocab_size = CONFIG["vocab_size"]
    assert isinstance(vocab_size, int)
    weights = {"model.embed_tokens.weight": draw(vocab_size, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": draw(HIDDEN),
            f"{at}self_attn.q_proj.weight": draw(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": draw(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": draw(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": draw(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{at}post_attention_layernorm.weight": draw(HIDDEN),
            f"{at}mlp.gate_proj.weight": draw(MLP, HIDDEN),
            f"{at}mlp.up_proj.weight": draw(MLP, HIDDEN),
            f"{at}mlp.down_proj.weight": draw(HIDDEN, MLP),
        }
    return weights


def write_safetensors(path: Path, weights: Weights, *, dtype: str = "F32") -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    raw = b""
    for name, array in weights.items():
        content = as_bytes(array, dtype)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(raw), len(raw) + len(content)]}
        raw += content
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw)


def as_bytes(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":  # the upper half of a float32
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).tobytes()


def write_folder(
    folder: Path,
    *,
    num_shards: int = 1,
    dtype: str = "F32",
    config: dict[str, object] | None = None,
    weights: Weights | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or tiny_weights()
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    rust_tokenizer().save(str(folder / "tokenizer.json"))
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype=dtype)
        return folder
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        write_safetensors(folder / file_name, part, dtype=dtype)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def permute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q_proj and k_proj."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    *,
    quantisation: gguf.GGMLQuantizationType | None = None,
    pre: str = "gpt-2",
    weights: Weights | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = sorted(rust_tokenizer().get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(rust_tokenizer().to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token_id < 2 else 1 for _, token_id in vocab])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    short = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, array in (weights or tiny_weights()).items():
        if "q_proj" in name or "k_proj" in name:
            array = permute_rows(array, NUM_HEADS if "q_proj" in name else NUM_KV_HEADS)
        parts = name.removesuffix(".weight").split(".", 3)
        if name.startswith("model.layers."):
            gguf_name = f"blk.{parts[2]}.{short[parts[3]]}.weight"
        else:
            whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
            gguf_name = whole.get(name, name)
        if quantisation is not None and array.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
