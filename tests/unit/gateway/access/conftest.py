"""A gateway with keys over a scripted cluster, a database in a file, and a calendar that a test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from core.access_config import AccessConfig
from core.clock import ManualClock
from core.config import parse_config
from core.ids import GatewayId, Incarnation
from core.telemetry import Telemetry
from gateway.access.assembly import KeyAccess
from gateway.access.keys import KeyTerms
from gateway.access.store import AccessStore, UsageFilter, UsageRow
from gateway.app import Gateway
from tests.support.asgi import Client, Reply
from tests.support.scripted import Script, ScriptedCluster
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.conftest import served_model

NOON = 1_796_040_000.0
"""Noon of 30 November 2026, UTC: a whole minute, and the last day of a month."""
ADMIN = "an-admin-key-of-some-length"


class Calendar:
    """The wall clock of a test."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@dataclass
class Site:
    client: Client
    cluster: ScriptedCluster
    gateway: Gateway
    store: AccessStore
    """A second connection, as the command line has it."""
    calendar: Calendar
    clock: ManualClock
    telemetry: Telemetry

    async def key(self, tenant: str = "acme", **terms: Any) -> dict[str, str]:
        """The headers of a new key."""
        _, text = await self.store.create_key(KeyTerms(tenant=tenant, **terms))
        return {"authorization": f"Bearer {text}"}

    async def ask(self, headers: dict[str, str], **more: Any) -> Reply:
        body = {"model": "m", "prompt": "say it", "max_tokens": 20, **more}
        return await self.client.post("/v1/completions", body, headers=headers)

    async def usage(self, tenant: str = "acme") -> list[UsageRow]:
        """Of a tenant, once everything that ended is written."""
        reply = await self.client.get("/admin/usage", headers={"authorization": f"Bearer {ADMIN}"})
        assert reply.status == 200, reply.body
        return await self.store.usage(UsageFilter(tenant=tenant))


OpenSite = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def open_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenSite:
    @asynccontextmanager
    async def opened(
        script: Script | None = None,
        *,
        has_admin: bool = True,
        names: tuple[str, ...] = ("m",),
        max_context: int = 200,
        **access: Any,
    ) -> AsyncIterator[Site]:
        config = AccessConfig(database=str(tmp_path / "keys.db"), **access)
        if has_admin:
            monkeypatch.setenv("BATON_ADMIN_KEY", ADMIN)
        cluster = ScriptedCluster(script or Script(steps=[[one] for one in ids_of("hello world")]))
        calendar, clock = Calendar(), ManualClock()
        opened = await KeyAccess.open(config, incarnation=Incarnation(7), clock=clock, wall=calendar)
        telemetry = Telemetry(component="gateway")
        gateway = Gateway(
            parse_config({"models": [{"name": "m"}]}),
            router=cluster,
            clients=cluster,
            models=[replace(served_model(), name=name, max_context=max_context) for name in names],
            telemetry=telemetry,
            gateway_id=GatewayId("g"),
            incarnation=Incarnation(7),
            access=opened,
        )
        gateway.start()
        store = await AccessStore.open(config)
        try:
            yield Site(
                client=Client(gateway.asgi),
                cluster=cluster,
                gateway=gateway,
                store=store,
                calendar=calendar,
                clock=clock,
                telemetry=telemetry,
            )
        finally:
            await gateway.close()
            await store.close()

    return opened
