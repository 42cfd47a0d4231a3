"""KV moves while the prompt is still computed: most of it before the seal, with the same tokens, and nothing leaks
whatever ends it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from core.config import load_config
from core.failpoints import Failpoints
from core.types import Role
from engine.engine import Engine, EngineConfig
from kvtransfer.backends.nixl import NixlBackend
from modelfiles.model import open_model
from tests.support.asgi import Client
from tests.support.local_cluster import MODEL, SETTINGS, LocalCluster
from tests.support.prompts import of_length

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
CHUNK = 64
LONG_CHUNK = 512
PREFILL_POINTS = ("prefill.ready", "prefill.announced")
DECODE_POINTS = ("decode.ready", "decode.digested")
STATES = [("prefill-0", point) for point in PREFILL_POINTS] + [("decode-0", point) for point in DECODE_POINTS]


def _engines(loaded: dict[str, Engine], chunk: int) -> dict[str, Engine]:
    """The same weights; P computes a prompt in chunks, and nobody caches anything."""
    num_blocks = load_config(overrides=SETTINGS, environ={}).models[0].kv.num_blocks
    assert isinstance(num_blocks, int)
    limits = EngineConfig(num_blocks=num_blocks, max_step_tokens=chunk, max_sequences=8, prefix_cache=False)
    files, model = open_model(MODEL), loaded["prefill-0"].model
    return {f"{role}-0": Engine(files, limits, model=model) for role in (Role.PREFILL, Role.DECODE)}


@pytest.fixture(scope="module")
def chunked(loaded_engines: dict[str, Engine]) -> dict[str, Engine]:
    return _engines(loaded_engines, CHUNK)


@pytest.fixture
async def cluster(chunked: dict[str, Engine]) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=chunked) as it:
        yield it
        await _until_idle(it)


async def _until_idle(cluster: LocalCluster) -> None:
    """Laws 1 and 2, well before any lease time could have cleaned up."""
    async with asyncio.timeout(10):
        while not all(
            worker.role.is_idle() and worker.context.engine.pool.counts().is_idle()
            for worker in cluster.workers.values()
        ):
            await asyncio.sleep(0.01)


async def _until_hit(failpoints: Failpoints, name: str, times: int = 1) -> None:
    async with asyncio.timeout(60):
        while failpoints.num_hits(name) < times:
            await asyncio.sleep(0.005)


def _prompt(num_tokens: int) -> list[int]:
    return of_length(open_model(MODEL).tokenizer(), num_tokens)


async def _timed(cluster: LocalCluster, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    answer = await cluster.http.post("/v1/completions", json=body, headers={"x-baton-timing": "1"})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.json()["timing"]


async def test_most_of_a_long_prompt_has_moved_when_it_is_sealed(loaded_engines: dict[str, Engine]) -> None:
    engines = _engines(loaded_engines, LONG_CHUNK)
    prompt = _prompt(2000)
    async with LocalCluster(lambda worker_id: NixlBackend(), "transfer.early_reads=false", engines=engines) as cluster:
        late_tokens, late = await _timed(cluster, prompt)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        seal = cluster.workers["prefill-0"].context.failpoints
        digested = cluster.workers["decode-0"].context.failpoints
        seal.set("prefill.seal", "pause:60")
        digested.set("decode.digested", "pause:0")
        asked = asyncio.create_task(_timed(cluster, prompt))
        await _until_hit(digested, "decode.digested", times=3)
        seal.set("prefill.seal", "")
        tokens, timing = await asked
        exports = cluster.workers["prefill-0"].role.exports  # type: ignore[attr-defined]
        assert exports.digests.num_made == 2000 // BLOCK, "each block was digested once"
        await _until_idle(cluster)
    block_bytes = engines["decode-0"].geometry.block_bytes
    assert tokens == late_tokens
    assert late["transfer_bytes"] == timing["transfer_bytes"] == 2000 // BLOCK * block_bytes
    assert late["transfer_early_bytes"] == 0
    assert timing["transfer_early_bytes"] == 3 * LONG_CHUNK // BLOCK * block_bytes


@pytest.mark.parametrize(("worker", "point"), STATES, ids=[point for _, point in STATES])
async def test_a_client_leaves_while_blocks_move_early(cluster: LocalCluster, worker: str, point: str) -> None:
    failpoints = cluster.workers[worker].context.failpoints
    failpoints.set(point, "pause:60")
    body = {"model": MODEL, "prompt": _prompt(150), "max_tokens": 8, "temperature": 0}
    call = Client(cluster.gateway.asgi).start("POST", "/v1/completions", body)
    await _until_hit(failpoints, point)
    failpoints.set(point, "")
    call.leave()
    await call.end()
    await _until_idle(cluster)
    tokens, timing = await _timed(cluster, _prompt(150))
    assert len(tokens) == 4 and timing["attempts"] == 1


@pytest.mark.parametrize("point", DECODE_POINTS)
async def test_a_failure_while_blocks_move_early_is_borne(cluster: LocalCluster, point: str) -> None:
    expected, _ = await _timed(cluster, _prompt(150))
    cluster.workers["decode-0"].context.failpoints.set(point, "once:error:internal_error")
    tokens, _ = await _timed(cluster, _prompt(150))
    assert tokens == expected


async def test_a_request_that_ends_at_token_1_drops_its_early_reads(cluster: LocalCluster) -> None:
    body = {"model": MODEL, "prompt": _prompt(150), "max_tokens": 1, "temperature": 0}
    answer = await cluster.http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    await _until_idle(cluster)
