"""Hugging Face ``transformers`` on the same device with a model of the same shape: its static cache, and its continuous
batching where this version has it."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.on_gpu.setup import Setup

_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError)


def static_cache(setup: Setup) -> dict[str, Any]:
    """Tokens per second with 1 and many streams. Raises ImportError where it is not installed."""
    return _measure(setup, "static cache", _static)


def continuous_batching(setup: Setup) -> dict[str, Any]:
    """The same. A step of its own: what its threads run into, they do not always tell, and then it never ends."""
    return _measure(setup, "continuous batching", _continuous)


def _measure(setup: Setup, way: str, run: Callable[[Setup, Any, int], float]) -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(**{k: v for k, v in setup.shape.items() if k != "architectures"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(setup.torch_dtype)
    try:
        with torch.device(setup.torch_device):
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)
    runs: list[dict[str, Any]] = []
    for num_streams in (1, setup.sizes.streams):
        row: dict[str, Any] = {"way": way, "streams": num_streams}
        try:
            row["tokens_per_s"] = num_streams * setup.sizes.answer / run(setup, model, num_streams)
        except _FAILURES as error:  # another version's API, or what it lacks here: said, and the rest goes on
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        runs.append(row)
    return {"version": transformers.__version__, "runs": runs}


def _prompts(setup: Setup, num_streams: int) -> torch.Tensor:
    shape = (num_streams, setup.sizes.prompt)
    return torch.randint(2, 250, shape, device=setup.torch_device)


@torch.inference_mode()
def _static(setup: Setup, model: Any, num_streams: int) -> float:
    """The better of two runs, without the compiler: it takes minutes."""
    answer = setup.sizes.answer
    options = {
        "max_new_tokens": answer,
        "min_new_tokens": answer,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
        "pad_token_id": 0,
    }
    times: list[float] = []
    for _ in range(2):
        ids = _prompts(setup, num_streams)
        setup.synchronize()
        began = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        setup.synchronize()
        times.append(time.perf_counter() - began)
        assert out.shape[1] == setup.sizes.prompt + answer, "as many tokens as asked for"
    return min(times)


def _continuous(setup: Setup, model: Any, num_streams: int) -> float:
    transformers: Any = importlib.import_module("transformers")
    answer = setup.sizes.answer
    generation = transformers.GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    times: list[float] = []
    for _ in range(2):
        prompts = _prompts(setup, num_streams).tolist()
        began = time.perf_counter()
        model.generate_batch(inputs=prompts, generation_config=generation)
        setup.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
