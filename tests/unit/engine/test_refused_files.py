"""Model files that cannot be used: the engine refuses them at start, in one line with the tensor and the file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from core.errors import ConfigError
from engine.engine import Engine, EngineConfig
from modelfiles import open_model
from tests.support.tiny_model import CONFIG, Weights, tiny_weights, write_folder, write_gguf, write_safetensors

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def changed(**arrays: np.ndarray | None) -> Weights:
    """The tiny model's weights with some replaced, or removed by None."""
    weights = tiny_weights() | {name: array for name, array in arrays.items() if array is not None}
    return {name: array for name, array in weights.items() if arrays.get(name, array) is not None}


def cut(path: Path, num_bytes: int) -> Path:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - num_bytes])
    return path


def with_kind(path: Path, tensor: str, kind: int) -> Path:
    """The file with another number for the format of a tensor."""
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    [num_dimensions] = struct.unpack_from("<I", raw, at)
    struct.pack_into("<I", raw, at + 4 + 8 * num_dimensions, kind)
    path.write_bytes(raw)
    return path


def file_with(weights: Weights) -> Callable[[Path], Path]:
    return lambda folder: write_gguf(folder / "tiny.gguf", weights=weights)


def folder_with(weights: Weights, num_shards: int = 1) -> Callable[[Path], Path]:
    return lambda folder: write_folder(folder, weights=weights, num_shards=num_shards)


def cut_file(folder: Path) -> Path:
    return cut(write_gguf(folder / "tiny.gguf"), 100)


def other_heads(folder: Path) -> Path:
    path = write_gguf(folder / "tiny.gguf")
    raw, key = bytearray(path.read_bytes()), b"llama.attention.head_count"
    struct.pack_into("<I", raw, raw.index(key + struct.pack("<I", 4)) + len(key) + 4, 12)
    path.write_bytes(raw)
    return path


def cut_shard(folder: Path) -> Path:
    cut(write_folder(folder, num_shards=3) / "model-00002-of-00003.safetensors", 4)
    return folder


def shard_without_a_tensor(folder: Path) -> Path:
    write_folder(folder, num_shards=2)
    names = list(tiny_weights())
    part = {name: tiny_weights()[name] for name in names[0::2] if name != UP}
    part |= {UP: tiny_weights()[UP]} if UP not in names[0::2] else {}
    write_safetensors(folder / "model-00001-of-00002.safetensors", part)
    other = {name: tiny_weights()[name] for name in names[1::2] if name != UP}
    write_safetensors(folder / "model-00002-of-00002.safetensors", other)
    return folder


def foreign_type(folder: Path) -> Path:
    path = write_folder(folder) / "model.safetensors"
    raw, stored = path.read_bytes(), f'"{UP}": {{"dtype": "F32"'.encode()
    assert stored in raw
    path.write_bytes(raw.replace(stored, stored.replace(b"F32", b"I32")))
    return folder


def bias_promised(folder: Path) -> Path:
    return write_folder(folder, config={**CONFIG, "attention_bias": True})


def smaller_config(folder: Path) -> Path:
    return write_folder(folder, config={**CONFIG, "vocab_size": 100})


NARROW = {UP: np.zeros((64, 24), np.float32)}
FEW_ROWS = {EMBEDDING: np.zeros((100, 32), np.float32)}
CASES: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "gguf, truncated": (cut_file, "blk.1.ffn_down.weight", "tiny.gguf", "truncated"),
    "gguf, missing": (file_with(changed(**{UP: None})), UP, "tiny.gguf", "missing"),
    "gguf, shape": (file_with(changed(**NARROW)), UP, "tiny.gguf", r"\(64, 24\).*\(64, 32\)"),
    "gguf, rows of heads": (other_heads, "model.layers.0.self_attn.q_proj.weight", "tiny.gguf", "32 rows for 12 heads"),
    "gguf, vocabulary": (file_with(changed(**FEW_ROWS)), EMBEDDING, "tiny.gguf", "265 ids.*100 rows"),
    "gguf, unknown format": (
        lambda folder: with_kind(write_gguf(folder / "tiny.gguf"), "blk.1.ffn_up.weight", 250),
        "blk.1.ffn_up.weight",
        "tiny.gguf",
        "unknown format",
    ),
    "gguf, format without a reader": (
        lambda folder: with_kind(
            write_gguf(folder / "tiny.gguf"), "blk.1.ffn_up.weight", gguf.GGMLQuantizationType.I32
        ),
        "blk.1.ffn_up.weight",
        "tiny.gguf",
        "I32",
    ),
    "gguf, foreign tensor": (
        file_with(changed(**{"blk.0.ssm_conv1d.weight": np.zeros((4, 4), np.float32)})),
        "blk.0.ssm_conv1d.weight",
        "tiny.gguf",
        "llama",
    ),
    "folder, truncated shard": (cut_shard, "model.layers", "model-00002-of-00003.safetensors", "truncated"),
    "folder, missing": (folder_with(changed(**{UP: None})), UP, "refused", "missing"),
    "folder, missing from its shard": (shard_without_a_tensor, UP, "model-0000", "index"),
    "folder, missing bias": (bias_promised, "model.layers.0.self_attn.q_proj.bias", "refused", "missing"),
    "folder, shape": (folder_with(changed(**NARROW), 2), UP, "model-0000", r"\(64, 24\).*\(64, 32\)"),
    "folder, embedding rows": (folder_with(changed(**FEW_ROWS)), EMBEDDING, "model.safetensors", r"\(100, 32\)"),
    "folder, vocabulary": (smaller_config, EMBEDDING, "model.safetensors", "265 ids.*100 rows"),
    "folder, foreign type": (foreign_type, UP, "model.safetensors", "I32"),
    "folder, foreign tensor": (
        folder_with(changed(**{"model.layers.0.mixer.weight": np.zeros((4, 4), np.float32)})),
        "model.layers.0.mixer.weight",
        "model.safetensors",
        "llama decoder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_used_is_refused_with_tensor_and_file(case: str, tmp_path: Path) -> None:
    damage, tensor, file_name, problem = CASES[case]
    folder = tmp_path / "refused"
    folder.mkdir()
    path = damage(folder)
    with pytest.raises(ConfigError, match=problem) as refusal:
        Engine(open_model(str(path)), EngineConfig(num_blocks=40))
    message = str(refusal.value)
    assert tensor in message and file_name in message, message
    assert "; " in message and "\n" not in message, message


def test_the_undamaged_model_is_accepted(tmp_path: Path) -> None:
    """So that each refusal above is of its damage and of nothing else."""
    for path in (
        write_gguf(tmp_path / "tiny.gguf"),
        write_folder(tmp_path / "a"),
        write_folder(tmp_path / "b", num_shards=3),
    ):
        Engine(open_model(str(path)), EngineConfig(num_blocks=40))
