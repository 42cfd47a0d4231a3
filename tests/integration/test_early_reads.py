"""KV moves while the prompt is still computed: most of it before the seal, with the same tokens."""

import asyncio
from typing import Any

import pytest

from core.config import load_config
from core.failpoints import Failpoints
from core.types import Role
from engine.engine import Engine, EngineConfig
from kvtransfer.backends.nixl import NixlBackend
from modelfiles.model import open_model
from tests.support.local_cluster import MODEL, SETTINGS, LocalCluster
from tests.support.prompts import of_length

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
CHUNK = 64
NUM_TOKENS = 250
"""Four chunks: after three of them nothing but the last is left to move at the seal."""


def _engines(loaded: dict[str, Engine]) -> dict[str, Engine]:
    """The same weights; P computes a prompt in chunks, and nobody caches anything."""
    num_blocks = load_config(overrides=SETTINGS, environ={}).models[0].kv.num_blocks
    assert isinstance(num_blocks, int)
    limits = EngineConfig(num_blocks=num_blocks, max_step_tokens=CHUNK, max_sequences=8, prefix_cache=False)
    files, model = open_model(MODEL), loaded["prefill-0"].model
    return {f"{role}-0": Engine(files, limits, model=model) for role in (Role.PREFILL, Role.DECODE)}


async def _until_idle(cluster: LocalCluster) -> None:
    """Laws 1 and 2, well before any lease time could have cleaned up."""
    async with asyncio.timeout(10):
        while not all(
            worker.role.is_idle() and worker.context.engine.pool.counts().is_idle()
            for worker in cluster.workers.values()
        ):
            await asyncio.sleep(0.01)


async def _until_hit(failpoints: Failpoints, name: str, times: int) -> None:
    async with asyncio.timeout(60):
        while failpoints.num_hits(name) < times:
            await asyncio.sleep(0.005)


async def _timed(cluster: LocalCluster, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    answer = await cluster.http.post("/v1/completions", json=body, headers={"x-baton-timing": "1"})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.json()["timing"]


async def test_most_of_a_long_prompt_has_moved_when_it_is_sealed(loaded_engines: dict[str, Engine]) -> None:
    engines = _engines(loaded_engines)
    prompt = of_length(open_model(MODEL).tokenizer(), NUM_TOKENS)
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
        assert exports.digests.num_made == -(-NUM_TOKENS // BLOCK), "each block was digested once"
        await _until_idle(cluster)
    block_bytes = engines["decode-0"].geometry.block_bytes
    assert tokens == late_tokens
    assert late["transfer_bytes"] == timing["transfer_bytes"] == -(-NUM_TOKENS // BLOCK) * block_bytes
    assert late["transfer_early_bytes"] == 0
    for each in (late, timing):
        stages = each["stages_ms"]
        assert sum(stages.values()) == pytest.approx(each["total_ms"], abs=1.0)
        parts = each["transfer_parts_ms"]
        assert set(parts) == {"wait", "post", "move", "verify", "publish"}
        assert sum(parts.values()) == pytest.approx(each["transfer_ms"], abs=0.01)
        assert stages["transfer"] <= each["transfer_ms"] + 0.01
    num_early = timing["transfer_early_bytes"] // block_bytes
    assert 3 * CHUNK // BLOCK <= num_early <= NUM_TOKENS // BLOCK, (
        "three chunks; of the last one at most the whole blocks"
    )
