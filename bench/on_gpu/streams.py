"""The engine with many streams: time between two tokens of a stream with 1 and with many of them, and what the host
adds to a step of the device."""

import random
import statistics
import time
from itertools import pairwise
from typing import Any

from bench.on_gpu.setup import Setup, measure_rates, stream
from bench.on_gpu.steps import decode_step
from engine.engine import Engine

_WARM_UP = 3
"""Steps of answers that are not counted, from the last prompt on."""


def streams(setup: Setup) -> dict[str, Any]:
    """Milliseconds by number of streams, all of which begin together; ``wall_over_step``: the host's time from step to
    step over the device's, with the same rows."""
    engine = setup.engine()
    figures: dict[str, Any] = {"streams": []}
    for num_streams in (1, setup.sizes.streams):
        play(engine, setup, 1, setup.sizes.prompt)  # compiles what a prompt wants
        figures["streams"].append(play(engine, setup, num_streams, setup.sizes.prompt))
    engine.close()
    rates = measure_rates(setup)
    for row in figures["streams"]:
        step = decode_step(setup, rates, int(row["streams"]), int(row["mean_context"]))
        row["wall_over_step"] = row["itl_ms"] / step["ms"]
    alone, together = figures["streams"]
    figures["itl_ratio"] = together["itl_ms"] / alone["itl_ms"]
    return figures


def play(engine: Engine, setup: Setup, num_streams: int, num_prompt: int) -> dict[str, float]:
    """Answers of ``sizes.answer`` tokens to random prompts; greedy."""
    rng = random.Random(num_streams)
    answer = setup.sizes.answer
    for number in range(num_streams):
        engine.add(stream(f"{num_streams}-{number}", rng.choices(range(2, 250), k=num_prompt), answer))
    began = time.perf_counter()
    ends: list[float] = []
    while engine.has_work:
        result = engine.step()
        if result.work.num_decode_rows == num_streams and not result.work.num_prompt_tokens:
            ends.append(time.perf_counter())
    total_s = time.perf_counter() - began
    gaps = [after - before for before, after in pairwise(ends)][_WARM_UP:] or [total_s]
    return {
        "streams": num_streams,
        "itl_ms": statistics.median(gaps) * 1e3,
        "itl_p99_ms": sorted(gaps)[int(0.99 * (len(gaps) - 1))] * 1e3,
        "tokens_per_s": num_streams * answer / total_s,
        "decode_tokens_per_s": num_streams / statistics.fmean(gaps),
        "mean_context": num_prompt + answer / 2,
    }
