"""A router that is killed and started anew begins with nothing, and knows what its workers hold as soon as they are
back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from core.costs import StepCosts
from core.errors import ServingError
from core.types import WorkerState
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import TINY, tiny_settings

pytestmark = pytest.mark.processes

WHOLE_S = 20.0
"""On a machine that others keep busy; it is 2 s on one's own."""
NUM_WORKERS = 3
PROMPTS = [[20 + number] * 160 for number in range(6)]


async def test_prompts_go_where_their_prefixes_are(tmp_path: Path) -> None:
    costs = StepCosts.linear(fixed_s=0.005, prompt_token_s=1e-4, decode_row_s=1e-4)
    settings = (
        *tiny_settings(tmp_path),
        "models.0.kv.prefix_cache=true",
        f"models.0.execution={{kind: mock, costs: {costs.model_dump_json()}}}",
        f"models.0.pools={{unified: {{replicas: {NUM_WORKERS}}}}}",
    )
    async with ProcessCluster(tmp_path, *settings) as cluster:
        await cached_tokens(cluster, PROMPTS)
        known = await cached_tokens(cluster, PROMPTS)
        assert min(known) >= 144, known
        before = cluster.pid("router")
        cluster.kill("router")
        took_s = await whole_again(cluster, before)
        # From the last one on: who took workers in turn, as in the beginning, would give them to others.
        assert await cached_tokens(cluster, PROMPTS[::-1]) == known[::-1]
    print(f"whole {took_s:.2f} s after its return")
    assert took_s < WHOLE_S


async def cached_tokens(cluster: ProcessCluster, prompts: list[list[int]]) -> list[int]:
    """What was found of each, one after the other."""
    answers = [await cluster.complete(prompt, model=TINY, max_tokens=2) for prompt in prompts]
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


async def whole_again(cluster: ProcessCluster, before: int) -> float:
    """Seconds from the moment in which the new router says that it serves."""
    async with asyncio.timeout(90):
        while cluster.ready_pid("router") in (None, before):
            await asyncio.sleep(0.005)
        returned_at = time.monotonic()
        while True:
            try:
                ready = [each for each in (await cluster.status()).workers if each.state is WorkerState.READY]
                if len(ready) == NUM_WORKERS:
                    return time.monotonic() - returned_at
            except ServingError:
                pass  # our own connection to it comes back too
            await asyncio.sleep(0.01)
