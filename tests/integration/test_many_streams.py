"""Sixteen requests of mixed lengths at once give exactly the answers of solo runs, and leave nothing behind."""

import asyncio
from typing import Any

import pytest

from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from modelfiles.model import open_model
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.prompts import of_length

pytestmark = pytest.mark.timeout(400)


def _requests() -> list[dict[str, Any]]:
    tokenizer = open_model(MODEL).tokenizer()
    lengths = (1, 3, 9, 15, 16, 17, 31, 40, 64, 65, 90, 120, 5, 200, 33, 12)
    requests: list[dict[str, Any]] = []
    for i, length in enumerate(lengths):
        fields: dict[str, Any] = {"prompt": of_length(tokenizer, length, start=7 * i), "max_tokens": 4 + 3 * (i % 5)}
        if i % 3 == 1:
            fields |= {"temperature": 0.8, "top_p": 0.9, "seed": i}
        if i % 3 == 2:
            fields |= {"temperature": 1.2, "top_k": 40, "seed": i, "logprobs": 3}
        requests.append(fields)
    return requests


async def test_sixteen_concurrent_streams_equal_their_solo_runs(engines: dict[str, Engine]) -> None:
    requests = _requests()
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        together = await asyncio.gather(*[cluster.complete(**request) for request in requests])
        alone = [await cluster.complete(**request) for request in requests]
    for request, one, other in zip(requests, alone, together, strict=True):
        assert one["choices"] == other["choices"], request
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert one["usage"][name] == other["usage"][name]


async def test_more_requests_than_blocks_queue_and_finish(engines: dict[str, Engine]) -> None:
    """Twice what D can reserve at once: the rest waits its turn, nobody is refused, nobody waits for ever."""
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        capacity = engines["decode-0"].limits.num_blocks // 16
        answers = await asyncio.gather(
            *[
                cluster.complete(f"Number {i} is", max_tokens=240, ignore_eos=True, stop=["."])
                for i in range(2 * capacity)
            ]
        )
    assert all(answer["choices"][0]["finish_reason"] in ("stop", "length") for answer in answers)
