"""Whatever moves the KV, the answers are the same."""

from typing import Any

import pytest

from engine.engine import Engine
from kvtransfer.backends import create_backend
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)
PROMPTS = ("The capital of France is", "1 2 3 4 5 6 7 8 " * 10)


async def answers(engines: dict[str, Engine], backend: str) -> list[list[int]]:
    """Token ids of every prompt, prefilled on one worker and decoded on the other."""

    async def one(cluster: LocalCluster, prompt: str) -> list[int]:
        answer: dict[str, Any] = await cluster.complete(prompt, max_tokens=8, ignore_eos=True, cache_salt=backend)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    async with LocalCluster(
        lambda _: create_backend(backend), f"transfer.backend={backend}", engines=engines
    ) as cluster:
        decode = cluster.workers["decode-0"]
        computed = decode.load().prompt_tokens_computed  # the engine has served other tests
        tokens = [await one(cluster, prompt) for prompt in PROMPTS]
        load = decode.load()
        assert dict(load.kv_bytes_received)[backend] > 0 and load.prompt_tokens_computed == computed
        return tokens


async def test_served_backends_give_the_tokens_of_one_sided_reads(engines: dict[str, Engine]) -> None:
    expected = await answers(engines, "nixl")
    assert await answers(engines, "tcp") == expected
    assert await answers(engines, "dist") == expected
