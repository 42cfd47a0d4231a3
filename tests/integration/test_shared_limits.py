"""Two gateway processes, one database of keys, one Valkey server: limits are shared, losses follow the setting, usage
survives a stop."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core.access_config import AccessConfig
from core.config import config_to_json, parse_config
from deploy.launcher import READY_PREFIX
from gateway.access.keys import KeyTerms
from gateway.access.store import AccessStore, UsageFilter, UsageRow
from rpc.server import RpcServer
from tests.integration.test_gateway_process import Handlers
from tests.support.scripted import Script, ScriptedCluster
from tests.support.tiny_model import write_folder
from tests.support.tiny_tokenizer import ids_of
from tests.support.valkey import ValkeyServer

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

LIMIT = 300
PATIENCE_S = 60
STORE_TIMEOUT_S = 2
BOUND_S = 10 + STORE_TIMEOUT_S
"""Of an answer while the store hangs; the machine is shared."""


@dataclass
class Gateway:
    url: str
    process: asyncio.subprocess.Process


@dataclass
class Pair:
    """The first gateway counts alone while the store is away, and writes usage only when it is told to stop; the second
    refuses, and writes at once."""

    first: Gateway
    second: Gateway
    store: AccessStore
    server: ValkeyServer
    http: httpx.AsyncClient
    answer: int = field(default=len(ids_of("Paris")))

    async def key(self, tenant: str, **terms: Any) -> dict[str, str]:
        _, text = await self.store.create_key(KeyTerms(tenant=tenant, **terms))
        return {"authorization": f"Bearer {text}"}

    async def tokenize(self, gateway: Gateway, headers: dict[str, str]) -> httpx.Response:
        return await self.http.post(f"{gateway.url}/tokenize", json={"prompt": "x"}, headers=headers)

    async def complete(self, gateway: Gateway, headers: dict[str, str]) -> None:
        body = {"model": "m", "prompt": "x", "max_tokens": 50}
        answer = await self.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == self.answer

    async def usage(self, tenant: str) -> UsageRow | None:
        rows = await self.store.usage(UsageFilter(tenant=tenant))
        return rows[0] if rows else None


async def start(folder: Path, router: str, access: dict[str, object]) -> Gateway:
    config = parse_config(
        {
            "models": [{"name": "m", "path": str(folder)}],
            "gateway": {"listen": "127.0.0.1:0", "access": access},
            "router": {"listen": router},
        }
    )
    arguments = ("-m", "baton.process", "gateway", "--config-json", config_to_json(config))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
    return Gateway(url=f"http://{json.loads(line.removeprefix(READY_PREFIX))['http']}", process=process)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("shared")
    write_folder(folder)
    server = ValkeyServer(folder).start()
    cluster = ScriptedCluster(Script(steps=[[one] for one in ids_of("Paris")]))
    handlers, rpc = Handlers(cluster), RpcServer()
    rpc.add_router(handlers)  # type: ignore[arg-type]  # the calls a gateway makes, no others
    rpc.add_prefill(handlers)
    rpc.add_decode(handlers)
    handlers.address = await rpc.start("127.0.0.1:0")
    access: dict[str, object] = {"database": str(folder / "keys.db"), "limits_store": server.url, "key_cache_s": 300}
    access["store_timeout_s"] = STORE_TIMEOUT_S
    store = await AccessStore.open(AccessConfig(database=str(folder / "keys.db"), database_timeout_s=30))
    first, second = await asyncio.gather(
        start(folder, handlers.address, access | {"on_store_loss": "open", "usage_flush_s": 60}),
        start(folder, handlers.address, access | {"on_store_loss": "closed", "usage_flush_s": 0.05}),
    )
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        yield Pair(first=first, second=second, store=store, server=server, http=http)
    for gateway in (first, second):
        if gateway.process.returncode is None:
            gateway.process.kill()
        await gateway.process.wait()
    await store.close()
    await cluster.close()
    await rpc.stop(0)
    server.kill()


async def test_two_gateways_enforce_one_limit(pair: Pair) -> None:
    headers = await pair.key("shared", requests_per_minute=LIMIT)
    statuses: dict[str, Counter[int]] = {"first": Counter(), "second": Counter()}

    async def hammer(name: str) -> None:
        gateway: Gateway = getattr(pair, name)
        while statuses[name][429] < 20:
            answers = await asyncio.gather(*(pair.tokenize(gateway, headers) for _ in range(10)))
            statuses[name].update(answer.status_code for answer in answers)

    began_at = time.time()
    await asyncio.gather(hammer("first"), hammer("second"))
    ended_at = time.time()
    assert set(statuses["first"]) == set(statuses["second"]) == {200, 429}
    passed = statuses["first"][200] + statuses["second"][200]
    # When a new minute begins meanwhile, the last one's share of the sliding minute is let go of, little by little.
    renewed_s = ended_at % 60 if ended_at // 60 > began_at // 60 else 0
    assert 0.98 * LIMIT <= passed <= 1.02 * LIMIT + LIMIT * renewed_s / 60, statuses
    assert statuses["first"][200] > 20
    assert statuses["second"][200] > 20


@pytest.mark.parametrize("loss", ["hangs", "is killed"])
async def test_a_lost_store_follows_the_setting_and_nobody_hangs(pair: Pair, loss: str) -> None:
    headers = await pair.key(f"lost-{loss[:2]}", requests_per_minute=1000)
    for gateway in (pair.first, pair.second):
        await until_served(pair, gateway, headers)
    pair.server.stop() if loss == "hangs" else pair.server.kill()
    try:
        for _ in range(3):
            async with asyncio.timeout(BOUND_S):
                assert (await pair.tokenize(pair.first, headers)).status_code == 200
            async with asyncio.timeout(BOUND_S):
                answer = await pair.tokenize(pair.second, headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "access_store_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            assert (await pair.http.get(f"{pair.second.url}/health")).status_code == 200
    finally:
        pair.server.go_on() if loss == "hangs" else pair.server.start()
    await until_served(pair, pair.second, headers)


async def test_usage_survives_a_stop_and_a_kill_loses_only_what_was_not_written(pair: Pair) -> None:
    stopped, killed = await pair.key("stopped", tokens_per_day=100_000), await pair.key("killed", max_streams=5)
    for gateway, headers in ((pair.first, stopped), (pair.second, killed)):
        await until_served(pair, gateway, headers)
        for _ in range(3):
            await pair.complete(gateway, headers)
    async with asyncio.timeout(PATIENCE_S):
        while (row := await pair.usage("killed")) is None or row.num_requests < 3:
            await asyncio.sleep(0.05)
    pair.second.process.kill()
    pair.first.process.terminate()
    assert await asyncio.wait_for(pair.first.process.wait(), PATIENCE_S) == 0
    for tenant in ("stopped", "killed"):
        row = await pair.usage(tenant)
        assert row is not None
        assert (row.num_requests, row.num_completion_tokens) == (3, 3 * pair.answer)


async def until_served(pair: Pair, gateway: Gateway, headers: dict[str, str]) -> None:
    """A store that is back is asked again within a second or so."""
    async with asyncio.timeout(PATIENCE_S):
        while (await pair.tokenize(gateway, headers)).status_code != 200:
            await asyncio.sleep(0.1)
