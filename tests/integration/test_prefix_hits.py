"""What a worker holds already is neither computed nor moved again, and the answer stays the same."""

import asyncio
from typing import Any

import pytest

from core.handoff import HandoffOutcome
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from modelfiles.model import open_model
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.prompts import of_length

pytestmark = pytest.mark.timeout(300)


def _prompt(num_tokens: int, start: int) -> list[int]:
    return of_length(open_model(MODEL).tokenizer(), num_tokens, start=start)


def _cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _tokens(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def test_a_prompt_again_is_neither_computed_nor_moved_again(engines: dict[str, Engine]) -> None:
    prefill, decode = engines["prefill-0"], engines["decode-0"]
    prompt = _prompt(100, start=500)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        first = await cluster.complete(prompt, max_tokens=5)
        computed, moved = prefill.counters().prompt_tokens_computed, cluster.workers["decode-0"].load()
        again = await cluster.complete(prompt, max_tokens=5)
        load = cluster.workers["decode-0"].load()
        role = cluster.workers["prefill-0"].role
        sent = role.exports.sent_bytes  # type: ignore[attr-defined]
        assert role.exports.outcomes == {HandoffOutcome.OK: 2}  # type: ignore[attr-defined]
    assert (_cached(first), _cached(again)) == (0, 96)
    assert _tokens(first) == _tokens(again)
    assert prefill.counters().prompt_tokens_computed - computed == 4
    assert load.prompt_tokens_computed == moved.prompt_tokens_computed, "D computes no prompt token"
    (_, num_bytes), (_, before) = load.kv_bytes_received[0], moved.kv_bytes_received[0]
    assert num_bytes - before == decode.geometry.block_bytes, "only the block that was not complete is moved"
    assert sent == num_bytes


async def test_a_prompt_of_whole_blocks_is_not_moved_at_all(engines: dict[str, Engine]) -> None:
    prompt = _prompt(64, start=900)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        first = await cluster.complete(prompt, max_tokens=5)
        before = cluster.workers["decode-0"].load().kv_bytes_received
        again = await cluster.complete(prompt, max_tokens=5)
        assert cluster.workers["decode-0"].load().kv_bytes_received == before
    assert _tokens(first) == _tokens(again) and _cached(again) == 48


async def test_local_answers_use_what_was_moved_and_the_other_way_round(engines: dict[str, Engine]) -> None:
    decode = engines["decode-0"]
    prompt, other = _prompt(70, start=1300), _prompt(70, start=1700)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        split = await cluster.complete(prompt, max_tokens=5)
    async with LocalCluster(lambda worker_id: NixlBackend(), "router.mode=local", engines=engines) as cluster:
        computed = decode.counters().prompt_tokens_computed
        local = await cluster.complete(prompt, max_tokens=5)
        assert decode.counters().prompt_tokens_computed - computed == 70 - 64
        other_local = await cluster.complete(other, max_tokens=5)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        other_split = await cluster.complete(other, max_tokens=5)
        ((_, num_bytes),) = cluster.workers["decode-0"].load().kv_bytes_received
    assert _tokens(split) == _tokens(local) and _tokens(other_local) == _tokens(other_split)
    assert _cached(local) == 64 and _cached(other_split) == 0
    assert num_bytes == decode.geometry.block_bytes


async def test_several_at_once_share_blocks_under_several_leases(engines: dict[str, Engine]) -> None:
    """Requests of one prompt overlap at P: its blocks are leased several times, and come back once."""
    prompt = _prompt(80, start=2100)
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines) as cluster:
        first = await cluster.complete(prompt, max_tokens=8)
        answers = await asyncio.gather(*[cluster.complete(prompt, max_tokens=8) for _ in range(6)])
    assert all(_tokens(answer) == _tokens(first) and _cached(answer) == 64 for answer in answers)
