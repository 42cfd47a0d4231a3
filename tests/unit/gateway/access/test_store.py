"""The database: sums that count each batch once, tables made by several at once, damage told in one line."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from core.access_config import AccessConfig
from core.errors import ConfigError
from gateway.access.errors import StoreAway
from gateway.access.keys import KeyRecord, KeyTerms
from gateway.access.ledger import Ledger
from gateway.access.store import AccessStore, UsageFilter, UsageRow
from gateway.usage import Usage
from tests.unit.gateway.access.conftest import NOON, Calendar


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AccessStore]:
    opened = await AccessStore.open(AccessConfig(database=str(tmp_path / "keys.db")))
    yield opened
    await opened.close()


def row(
    number: int = 1, *, day: str = "2026-11-30", key_id: str = "k", tenant: str = "a", model: str = "m"
) -> UsageRow:
    return UsageRow(
        day=day,
        tenant=tenant,
        key_id=key_id,
        model=model,
        num_requests=number,
        num_prompt_tokens=2 * number,
        num_cached_tokens=number,
        num_completion_tokens=3 * number,
    )


def key(key_id: str = "k") -> KeyRecord:
    terms = KeyTerms(tenant="a")
    return KeyRecord(key_id=key_id, secret_hash=b"", terms=terms, created_at=0, expires_at=None, revoked_at=None)


ONE = Usage(num_prompt_tokens=2, num_completion_tokens=3, num_cached_tokens=1)


async def test_a_batch_counts_once_however_often_it_is_sent(store: AccessStore) -> None:
    for batch in (1, 1, 2, 1, 2, 3):
        await store.add_usage([row()], writer="w", batch=batch)
    await store.add_usage([row()], writer="v", batch=1)
    assert await store.usage(UsageFilter()) == [row(4)]
    assert await store.num_tokens(UsageFilter(key_id="k")) == 20


async def test_usage_is_found_by_tenant_key_and_day(store: AccessStore) -> None:
    rows = [row(day="2026-11-29"), row(), row(key_id="l"), row(tenant="b", key_id="n"), row(model="o")]
    await store.add_usage(rows, writer="w", batch=1)
    assert len(await store.usage(UsageFilter())) == 5
    assert {one.key_id for one in await store.usage(UsageFilter(tenant="a"))} == {"k", "l"}
    assert [one.day for one in await store.usage(UsageFilter(key_id="k", until="2026-11-29"))] == ["2026-11-29"]
    assert await store.num_tokens(UsageFilter(key_id="k", since="2026-11", until="2026-11-31")) == 15
    assert await store.num_tokens(UsageFilter(key_id="none")) == 0


async def test_a_large_batch_is_whole(store: AccessStore) -> None:
    rows = [row(key_id=f"{number:05}") for number in range(1200)]
    await store.add_usage(rows, writer="w", batch=1)
    assert await store.num_tokens(UsageFilter()) == 1200 * 5


async def test_gateways_start_and_write_at_once(tmp_path: Path) -> None:
    config = AccessConfig(database=str(tmp_path / "keys.db"))
    stores = await asyncio.gather(*(AccessStore.open(config) for _ in range(4)))

    async def write(at: int) -> None:
        for batch in range(1, 6):
            await stores[at].add_usage([row()], writer=f"w{at}", batch=batch)

    await asyncio.gather(*(write(at) for at in range(4)))
    assert await stores[0].num_tokens(UsageFilter()) == 4 * 5 * 5
    for one in stores:
        await one.close()


async def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    config = AccessConfig(database=str(tmp_path / "keys.db"))
    await (await AccessStore.open(config)).close()
    with sqlite3.connect(tmp_path / "keys.db") as connection:
        connection.execute("UPDATE baton_schema SET version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="version 99"):
        await AccessStore.open(config)


async def test_a_locked_database_is_a_bounded_wait(tmp_path: Path) -> None:
    config = AccessConfig(database=str(tmp_path / "keys.db"), database_timeout_s=0.2)
    store = await AccessStore.open(config)
    blocker = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        async with asyncio.timeout(20):
            with pytest.raises(StoreAway):
                await store.create_key(KeyTerms(tenant="a"))
            assert await store.list_keys() == [], "readers do not wait for the writer"
    finally:
        blocker.close()
        await store.close()


class LossyStore:
    """Loses answers: what it was asked is in the database all the same, or not."""

    def __init__(self, store: AccessStore) -> None:
        self._store = store
        self.losses: list[str] = []

    async def add_usage(self, rows: Sequence[UsageRow], *, writer: str, batch: int) -> None:
        loss = self.losses.pop(0) if self.losses else ""
        if loss != "request":
            await self._store.add_usage(rows, writer=writer, batch=batch)
        if loss:
            raise StoreAway("database", "scripted")


async def test_a_lost_answer_loses_and_doubles_nothing(store: AccessStore) -> None:
    lossy = LossyStore(store)
    ledger = Ledger(lossy, writer="w", wall=Calendar())
    lossy.losses = ["request", "answer", "", "answer", "request", "answer", ""]
    for _ in range(12):
        ledger.add(key(), "m", ONE)
        try:
            await ledger.flush()
        except StoreAway:
            ledger.add(key(), "m", ONE)
    await ledger.close()
    (total,) = await store.usage(UsageFilter())
    assert (total.num_requests, total.num_completion_tokens) == (17, 3 * 17)


async def test_usage_belongs_to_the_day_it_ended_in(store: AccessStore) -> None:
    calendar = Calendar()
    ledger = Ledger(store, writer="w", wall=calendar)
    ledger.add(key(), "m", ONE)
    calendar.now = NOON + 12 * 3600
    ledger.add(key(), "m", ONE)
    await ledger.close()
    assert [one.day for one in await store.usage(UsageFilter())] == ["2026-11-30", "2026-12-01"]


async def test_what_cannot_be_written_at_the_end_is_told(caplog: pytest.LogCaptureFixture, store: AccessStore) -> None:
    lossy = LossyStore(store)
    lossy.losses = ["request"]
    ledger = Ledger(lossy, writer="w", wall=Calendar())
    ledger.add(key(), "m", ONE)
    await ledger.close()
    (told,) = [record for record in caplog.records if record.message == "usage lost"]
    assert vars(told)["num_completion_tokens"] == 3
