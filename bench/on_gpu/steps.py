"""Steps of the model alone, against floors measured in the same process: steps of answers, as graphs, at several rows
and contexts, and prompts."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.on_gpu.setup import Rates, Setup, measure_rates, stream
from engine.batch import make_plan
from engine.config import resolve
from engine.engine import EngineConfig
from engine.kv_cache import KVCache
from engine.model.attention import Span
from engine.model.prompt_gpu import SIZES, PromptStep
from engine.model.step_gpu import DecodeStep, NewRow
from engine.scheduler import Chunk

BLOCK_SIZE = 16


def decode_steps(setup: Setup) -> dict[str, Any]:
    """Milliseconds of a step by rows and context, and over its floor: the weights and the KV, read once, or the
    arithmetic if that takes longer."""
    rates = measure_rates(setup)
    figures: dict[str, Any] = {"read_gbps": rates.read_bytes_per_s / 1e9, "steps": []}
    for rows, context in setup.sizes.contexts:
        figures["steps"].append(decode_step(setup, rates, rows, context))
    return figures


def decode_step(setup: Setup, rates: Rates, rows: int, context: int) -> dict[str, float]:
    """One kind of step, recorded and replayed. Every row goes on by one token each time."""
    per_row = -(-(context + 1 + 4 * setup.sizes.repeats) // BLOCK_SIZE)
    cache = make_cache(setup, rows * per_row)
    limit = per_row * BLOCK_SIZE
    step = DecodeStep(setup.model, cache, max_rows=rows, max_context=limit, invariant=False, buckets=(rows,))
    began = time.perf_counter()
    step.record()
    capture_s = time.perf_counter() - began

    def stand() -> None:
        step.put(
            [
                NewRow(
                    row=row,
                    token=3 + row,
                    position=context - 1,
                    blocks=range(row * per_row, (row + 1) * per_row),
                    temperature=0.0,
                    top_k=0,
                    top_p=1.0,
                    min_p=0.0,
                    key_prefix=row,
                )
                for row in range(rows)
            ]
        )

    stand()
    with torch.inference_mode():
        seconds = setup.seconds(lambda: step.run(rows))
    config = setup.config
    read_s = (setup.weight_bytes + rows * context * setup.kv_bytes) / rates.read_bytes_per_s
    linears = setup.weight_bytes / setup.torch_dtype.itemsize
    attention = 4 * rows * config.num_layers * config.q_size * context
    compute_s = (2 * rows * linears + attention) / rates.flops_per_s
    floor_s = max(read_s, compute_s)
    return {
        "rows": rows,
        "context": context,
        "ms": seconds * 1e3,
        "floor_ms": floor_s * 1e3,
        "ratio": seconds / floor_s,
        "capture_s": capture_s,
    }


def prefills(setup: Setup) -> dict[str, Any]:
    """Milliseconds of a prompt in one chunk; the short one over the time to read the weights, the long ones as a share
    of the matrix rate."""
    rates = measure_rates(setup)
    rows: list[dict[str, float]] = []
    for num_tokens in (setup.sizes.prompt, *setup.sizes.prefills):
        cache = make_cache(setup, -(-num_tokens // BLOCK_SIZE))
        with torch.inference_mode():
            seconds = setup.seconds(_prompt(setup, cache, num_tokens), repeats=max(1, setup.sizes.repeats // 4))
        floor_s = (setup.weight_bytes + num_tokens * setup.kv_bytes) / rates.read_bytes_per_s
        rate = setup.flops(num_tokens) / seconds
        rows.append(
            {
                "tokens": num_tokens,
                "ms": seconds * 1e3,
                "over_weight_read": seconds / floor_s,
                "tflops": rate / 1e12,
                "share_of_matrix_rate": rate / rates.flops_per_s,
            }
        )
    return {"matrix_tflops": rates.flops_per_s / 1e12, "prefills": rows}


def _prompt(setup: Setup, cache: KVCache, num_tokens: int) -> Callable[[], object]:
    """As the engine runs it: a short one is recorded."""
    table = list(range(cache.geometry.num_blocks))
    tokens = torch.randint(2, setup.config.vocab_size, (num_tokens,)).tolist()
    if num_tokens <= SIZES[-1] and setup.is_gpu:
        step = PromptStep(setup.model, cache, max_context=setup.sizes.max_context)
        step.record(lambda done, of: None)
        sequence = stream("prompt", tokens, 2, block_table=table)
        return partial(step.run, [Chunk(sequence=sequence, start=0, num_tokens=num_tokens)])
    span = Span(block_table=table, start=0, num_tokens=num_tokens)
    plan = make_plan(cache, [span], setup.config.num_heads, num_rows=num_tokens, invariant=False)
    ids = torch.tensor(tokens).to(setup.torch_device)

    def run() -> None:
        hidden = setup.model.forward(ids, plan)
        setup.model.logits(hidden[-1:])

    return run


def make_cache(setup: Setup, num_blocks: int) -> KVCache:
    """With random KV: attention over zeros is no measure."""
    config = EngineConfig(device=setup.device, dtype=setup.dtype, num_blocks=num_blocks, max_context=16)
    _, shape, _ = resolve(setup.files, config)
    cache = KVCache(shape, num_blocks, setup.device)
    cache.tensor.normal_()
    return cache
