"""The whole engine with the kernels of a GPU: the same scores and answers as on CPU, family by family."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from engine.device import Device
from engine.engine import Engine, EngineConfig
from modelfiles import open_model
from tests.kernels.gpu import DEVICE
from tests.support.engine_runs import make_sequence, run
from tests.support.tiny_families import CONFIGS, VOCAB_SIZE, write_family

ON = "cuda" if DEVICE.type == "cuda" else "interpreter"
FAMILIES = ("llama, tied, biases", *(name for name in CONFIGS if name in ("gemma3", "qwen3", "qwen3_moe")))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_answers_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    files = open_model(str(write_family(name, tmp_path).folder))
    config = {"num_blocks": 12, "max_context": 64, "max_step_tokens": 12, "max_sequences": 4, "dtype": "float32"}
    asked = [prompt(length) for length in (1, 4, 20)]  # the last one in chunks, the others beside it
    results = []
    for device in ("cpu", ON):
        engine = Engine(files, EngineConfig(device=device, invariant=device == "cpu", **config))  # type: ignore[arg-type]
        sequences = [make_sequence(tokens, max_tokens=2, ignore_eos=True, logprobs=0) for tokens in asked]
        recorded = run(engine, *sequences)
        results.append([(recorded.tokens[each.key], recorded.scores[each.key]) for each in sequences])
        engine.close()
    for (tokens, scores), (expected, expected_scores) in zip(*reversed(results), strict=True):
        assert tokens == expected
        torch.testing.assert_close(torch.stack(scores), torch.stack(expected_scores), rtol=1e-3, atol=1e-4)


def test_a_prefix_that_is_cached_is_attended_to(tmp_path: Path) -> None:
    files = open_model(str(write_family("llama, tied, biases", tmp_path).folder))
    engine = Engine(files, EngineConfig(device=ON, num_blocks=12, max_context=64, dtype="float32", invariant=True))
    first, second = (make_sequence(prompt(40), max_tokens=2, ignore_eos=True, logprobs=0) for _ in range(2))
    recorded = run(engine, first)
    again = run(engine, second)
    assert engine.counters().prompt_tokens_cached == 32
    assert again.tokens[second.key] == recorded.tokens[first.key]
    if ON == "interpreter":
        torch.testing.assert_close(
            torch.stack(again.scores[second.key]), torch.stack(recorded.scores[first.key]), rtol=1e-5, atol=1e-5
        )
    engine.close()


def test_what_a_device_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = open_model(str(write_family("llama, tied, biases", tmp_path).folder))
    with pytest.raises(ConfigError, match=r"dtype is int8: on .* say auto"):
        Engine(files, EngineConfig(device=ON, num_blocks=12, max_context=64, dtype="int8"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            Engine(files, EngineConfig(device=Device.CUDA, num_blocks=12, max_context=64))
        monkeypatch.setattr("triton.knobs.runtime.interpret", False)
        with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
            Engine(files, EngineConfig(device=Device.INTERPRETER, num_blocks=12, max_context=64))
