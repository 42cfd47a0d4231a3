"""Drive an OpenAI endpoint with streamed completions and measure what a client sees."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

WORDS = ("river", "stone", "lamp", "garden", "winter", "bridge", "paper", "cloud", "engine", "harbour", "silver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``concurrency`` clients send ``num_requests`` requests between them; prompts are seeded and all different."""

    num_requests: int
    concurrency: int
    prompt_words: int
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request as its client saw it."""

    ttft_s: float
    duration_s: float
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens after the first."""
        return (self.duration_s - self.ttft_s) / max(self.num_completion_tokens - 1, 1)


async def run_load(url: str, model: str, workload: Workload) -> tuple[list[Sample], float]:
    """All samples and the seconds that the whole run took. Raises httpx.HTTPError when a request fails."""
    random_words = random.Random(workload.seed)
    prompts = [" ".join(random_words.choices(WORDS, k=workload.prompt_words)) for _ in range(workload.num_requests)]
    samples: dict[str, Sample] = {}
    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client, asyncio.TaskGroup() as group:
        todo = iter(prompts)

        async def one_client() -> None:
            for prompt in todo:
                samples[prompt] = await _one(client, model, prompt, workload.max_tokens)

        for _ in range(workload.concurrency):
            group.create_task(one_client())
    return list(samples.values()), time.perf_counter() - started


async def _one(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first_at = 0.0
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.is_error:
            await answer.aread()
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first_at = first_at or time.perf_counter()
            usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    ended = time.perf_counter()
    return Sample(
        ttft_s=first_at - started,
        duration_s=ended - started,
        num_prompt_tokens=usage["prompt_tokens"],
        num_completion_tokens=usage["completion_tokens"],
    )


def report(samples: Sequence[Sample], elapsed_s: float) -> str:
    """A few lines: rates of the whole run, then the quantiles that a service level objective names."""
    tokens = sum(sample.num_completion_tokens for sample in samples)
    prompt_tokens = sum(sample.num_prompt_tokens for sample in samples)
    rows = (
        ("TTFT", [sample.ttft_s for sample in samples]),
        ("TPOT", [sample.tpot_s for sample in samples]),
        ("E2E", [sample.duration_s for sample in samples]),
    )
    lines = [
        f"{len(samples)} requests in {elapsed_s:.2f} s: {len(samples) / elapsed_s:.2f} requests/s, "
        f"{tokens / elapsed_s:.1f} tokens/s out, {prompt_tokens / elapsed_s:.1f} tokens/s in",
        "        p50 ms    p95 ms    max ms",
    ]
    for name, values in rows:
        quantiles = (quantile(values, 0.5), quantile(values, 0.95), max(values))
        lines.append(f"{name:<5}" + "".join(f"{1e3 * value:10.1f}" for value in quantiles))
    return "\n".join(lines)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share ``q`` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1))]
