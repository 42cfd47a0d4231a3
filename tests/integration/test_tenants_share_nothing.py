"""Two tenants with one prompt have nothing of each other's: no cached block, and so no time that tells of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.access_config import AccessConfig
from engine.engine import Engine
from gateway.access.keys import KeyTerms
from gateway.access.store import AccessStore
from kvtransfer.backends.nixl import NixlBackend
from modelfiles.model import open_model
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.prompts import of_length

pytestmark = pytest.mark.timeout(300)


async def test_a_shared_prefix_is_a_hit_for_its_tenant_and_for_no_other(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    database = str(tmp_path / "keys.db")
    prefill, decode = engines["prefill-0"], engines["decode-0"]
    prompt = of_length(open_model(MODEL).tokenizer(), 100, start=2500)
    store = await AccessStore.open(AccessConfig(database=database))
    keys = {name: await store.create_key(KeyTerms(tenant=name.rstrip("2"))) for name in ("ada", "ada2", "bob")}
    await store.close()
    async with LocalCluster(
        lambda worker_id: NixlBackend(), f"gateway.access.database={database}", engines=engines
    ) as cluster:

        async def ask(name: str, **more: Any) -> tuple[int, int, int, list[int]]:
            """Cached tokens as told, prompt tokens that P computed, bytes that moved, and the answer."""
            cluster.http.headers["authorization"] = f"Bearer {keys[name][1]}"
            computed = prefill.counters().prompt_tokens_computed
            moved = sum(amount for _, amount in cluster.workers["decode-0"].load().kv_bytes_received)
            answer = await cluster.complete(prompt, max_tokens=4, **more)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            moved = sum(amount for _, amount in cluster.workers["decode-0"].load().kv_bytes_received) - moved
            return (
                cached,
                prefill.counters().prompt_tokens_computed - computed,
                moved // decode.geometry.block_bytes,
                answer["choices"][0]["token_ids"],
            )

        *first, tokens = await ask("ada")
        assert first == [0, 100, 7]
        assert await ask("ada") == (96, 4, 1, tokens)
        assert await ask("ada2") == (96, 4, 1, tokens), "two keys of one tenant share"
        assert await ask("bob") == (0, 100, 7, tokens), "as cold as the first request of all"
        assert await ask("bob", cache_salt="ada") == (0, 100, 7, tokens), "no salt of a request leads to another tenant"
        assert await ask("bob") == (96, 4, 1, tokens)
