"""Models on disk: the same facts from every format, and one clear line for every file that cannot be used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from core.errors import ConfigError
from modelfiles import ModelFileError, RopeScaling, open_model
from tests.support.tiny_model import CONFIG, tiny_weights, write_folder, write_gguf


def test_a_folder_and_a_gguf_file_of_one_model_say_the_same(tmp_path: Path) -> None:
    folder = open_model(str(write_folder(tmp_path / "hf")))
    file = open_model(str(write_gguf(tmp_path / "tiny.gguf")))
    assert folder.config == file.config
    assert sorted(folder.tensor_names()) == sorted(file.tensor_names()) == sorted(tiny_weights())
    for name, array in tiny_weights().items():
        for model in (folder, file):
            loaded = model.load_tensor(name)
            assert (loaded.dtype, loaded.shape) == (np.float32, array.shape)
            assert np.array_equal(loaded, array), name
    text = "hello world 12<|im_end|>\U0001f999"
    for parse_special in (False, True):
        ids = folder.tokenizer().encode(text, parse_special=parse_special)
        assert ids == file.tokenizer().encode(text, parse_special=parse_special)
    assert (folder.name, file.name) == ("hf", "tiny")


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_are_one_model(tmp_path: Path, num_shards: int) -> None:
    model = open_model(str(write_folder(tmp_path, num_shards=num_shards)))
    for name, array in tiny_weights().items():
        assert np.array_equal(model.load_tensor(name), array)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_stored_types_are_read_exactly(tmp_path: Path, dtype: str) -> None:
    model = open_model(str(write_folder(tmp_path, dtype=dtype)))
    wanted = {"F16": np.float16, "BF16": np.float32, "F64": np.float64}[dtype]
    for name, array in tiny_weights().items():
        loaded = model.load_tensor(name)
        assert loaded.dtype == wanted
        upper_half = (array.view(np.uint32) >> 16 << 16).view(np.float32)
        assert np.array_equal(loaded, upper_half if dtype == "BF16" else array.astype(wanted))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_tensors_are_dequantised_before_rows_are_put_back(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", quantisation=kind)))
    for name, array in tiny_weights().items():
        loaded = model.load_tensor(name)
        wanted = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else array
        assert np.allclose(loaded, wanted, atol=1e-6), name


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    first = open_model(str(write_folder(tmp_path / "a")))
    assert first.digest == open_model(str(write_folder(tmp_path / "b"))).digest
    changed = write_folder(tmp_path / "c")
    path = changed / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert open_model(str(changed)).digest != first.digest
    other = write_folder(tmp_path / "d", config={**CONFIG, "rope_theta": 1.0})
    assert open_model(str(other)).digest != first.digest
    assert open_model(str(other)).text_digest() == first.text_digest()


@pytest.mark.parametrize(
    ("table", "theta", "scaling"),
    [
        ({"rope_theta": 5.0}, 5.0, None),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 6.0, "rope_type": "default"}}, 6.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 100000.0, RopeScaling(kind="linear", factor=2.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            100000.0,
            RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64),
        ),
    ],
)
def test_rope_is_read_in_both_spellings(
    tmp_path: Path, table: dict[str, object], theta: float, scaling: RopeScaling | None
) -> None:
    config = open_model(str(write_folder(tmp_path, config={**CONFIG, **table}))).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("values", "window", "layers"),
    [
        ({"model_type": "llama", "sliding_window": 9}, None, ()),
        ({"model_type": "mistral", "sliding_window": 9}, 9, (0, 1, 2, 3, 4, 5, 6)),
        ({"model_type": "mistral", "sliding_window": None}, None, ()),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 5}, None, ()),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 5}, 9, (5, 6)),
        ({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 7}, None, ()),
        ({"model_type": "gemma3_text", "sliding_window": 9}, 9, (0, 1, 2, 3, 4, 6)),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 2}, 9, (0, 2, 4, 6)),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 5],
            },
            9,
            (1,),
        ),
    ],
)
def test_windows_are_read_as_each_family_spells_them(
    tmp_path: Path, values: dict[str, object], window: int | None, layers: tuple[int, ...]
) -> None:
    config = open_model(str(write_folder(tmp_path, config={**CONFIG, "num_hidden_layers": 7, **values}))).config
    assert (config.sliding_window, config.sliding_layers) == (window, layers)
    assert [config.window_of(layer) for layer in range(7)] == [window if one in layers else None for one in range(7)]


def test_both_bases_of_gemma_are_read_in_both_spellings(tmp_path: Path) -> None:
    gemma = {**CONFIG, "model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 168}
    linear = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": linear}
    newer = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
        }
    }
    for name, spelling in (("older", older), ("newer", newer)):
        config = open_model(str(write_folder(tmp_path / name, config={**gemma, **spelling}))).config
        assert (config.rope_theta, config.rope_local_theta, config.query_scalar) == (7.0, 5.0, 168.0)
        assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)


def test_a_stretched_context_is_as_long_as_yarn_makes_it(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = open_model(str(write_folder(tmp_path, config={**CONFIG, "rope_scaling": yarn}))).config
    assert config.max_context == 512
    assert config.rope_scaling is not None and config.rope_scaling.attention_factor == pytest.approx(1.1386294)


def test_llama_3s_frequencies_in_a_gguf_file_are_its_scaling(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 8.0, 8.0], np.float32)
    model = open_model(
        str(write_gguf(tmp_path / "tiny.gguf", weights={**tiny_weights(), "rope_freqs.weight": factors}))
    )
    assert model.config.rope_scaling == RopeScaling(kind="factors", factors=(1.0, 1.5, 8.0, 8.0))
    assert sorted(model.tensor_names()) == sorted(tiny_weights())


def test_generation_config_gives_defaults_and_the_end_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "top_k": 7, "temperature": 0.2}))
    model = open_model(str(folder))
    assert model.config.eos_token_ids == (1, 5)
    assert (model.generation_defaults.top_k, model.generation_defaults.temperature) == (7, 0.2)
    assert model.generation_defaults.top_p is None


def damage_config(**values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **values}))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes]) and None


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (damage_config(model_type="mamba"), "mamba"),
        (damage_config(hidden_size="many"), "hidden_size"),
        (damage_config(num_attention_heads=True), "num_attention_heads"),
        (damage_config(num_key_value_heads=3), "KV heads"),
        (damage_config(num_hidden_layers=0), "num_layers"),
        (damage_config(eos_token_id=10**6), "EOS"),
        (damage_config(rope_scaling={"rope_type": "longrope", "factor": 2}), "longrope"),
        (damage_config(hidden_act="relu"), "relu"),
        (damage_config(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (damage_config(sliding_window=0, model_type="mistral"), "sliding_window"),
        (damage_config(sliding_window=8, layer_types=["full_attention"]), "layer_types"),
        (damage_config(sliding_window=8, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (damage_config(rope_scaling={"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}), "partial"),
        (
            damage_config(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=5, moe_intermediate_size=8),
            "exceeds",
        ),
        (write("config.json", "{"), "JSON"),
        (write("config.json", "[]"), "object"),
        (remove("config.json"), "config.json"),
        (remove("model.safetensors"), "model.safetensors"),
        (cut("model.safetensors", 4), "truncated"),
        (cut("model.safetensors", 5000), "truncated"),
        (cut("model.safetensors", 0), "truncated"),
        (write("model.safetensors", "\x02\0\0\0\0\0\0\0[]"), "header"),
        (write("model.safetensors", "\x02\0\0\0\0\0\0\0x{"), "header"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], part: str
) -> None:
    folder = write_folder(tmp_path)
    damage(folder)
    with pytest.raises(ModelFileError) as refusal:
        open_model(str(folder))
    assert part in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert "; " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_truncation_of_a_gguf_file_is_told_and_none_is_read(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for num_bytes in [*range(0, 200, 7), *range(200, len(whole) - 40, 997)]:
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            open_model(str(path))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_gguf_header_is_an_error_of_ours_or_harmless(tmp_path: Path, seed: int) -> None:
    raw = bytearray(write_gguf(tmp_path / "tiny.gguf").read_bytes())
    generator = np.random.default_rng(seed)
    for _ in range(3):
        raw[int(generator.integers(4, 2000))] = int(generator.integers(256))
    (tmp_path / "tiny.gguf").write_bytes(raw)
    with contextlib.suppress(ModelFileError):
        open_model(str(tmp_path / "tiny.gguf")).tokenizer()


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/nowhere/model", "no such model"),
        ("missing.gguf", "no such model"),
        ("not a name", "no such model"),
        ("owner/never-downloaded-model", "hub"),
    ],
)
def test_a_name_that_means_nothing_is_told_with_what_would(path: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        open_model(path)


def test_files_of_other_kinds_are_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("notes.txt", "empty.gguf"):
        with pytest.raises(ModelFileError, match=name):
            open_model(str(tmp_path / name))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_model(str(tmp_path / ".."))


def test_an_unknown_pre_tokenizer_is_refused_and_not_guessed(tmp_path: Path) -> None:
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", pre="from-the-future")))
    with pytest.raises(ModelFileError, match="from-the-future"):
        model.tokenizer()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    model = open_model(str(write_folder(tmp_path, config={**CONFIG, "vocab_size": 10})))
    with pytest.raises(ModelFileError, match="ids"):
        model.tokenizer()
