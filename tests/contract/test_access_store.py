"""The database of keys and usage, SQLite and PostgreSQL alike: sums that count each batch once, tables that several
make at once, nothing lost or doubled when an answer is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from core.access_config import AccessConfig
from core.errors import ConfigError
from gateway.access.errors import StoreAway
from gateway.access.keys import KeyRecord, KeyTerms, PriorityClass, split_key
from gateway.access.ledger import Ledger
from gateway.access.store import AccessStore, UsageFilter, UsageRow
from gateway.usage import Usage
from tests.support.postgres import PostgresServer

DAY_S = 86_400
NOON = 1_796_040_000.0
"""Noon of 30 November 2026, UTC."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> AccessConfig:
    """An empty database."""
    if request.param == "sqlite":
        return AccessConfig(database=str(tmp_path / "keys.db"), database_timeout_s=30)
    server: PostgresServer = request.getfixturevalue("postgres")
    return AccessConfig(
        database=server.new_database(), database_password_file=str(server.password_file), database_timeout_s=30
    )


@pytest.fixture
async def store(config: AccessConfig) -> AsyncIterator[AccessStore]:
    opened = await AccessStore.open(config)
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


async def test_a_key_is_kept_as_it_was_made(store: AccessStore) -> None:
    terms = KeyTerms(
        tenant="acme",
        name="schön",
        models=("m", "org/n"),
        priority=PriorityClass.HIGH,
        requests_per_minute=60,
        tokens_per_minute=10**6,
        max_streams=8,
        tokens_per_day=10**9,
        tokens_per_month=10**12,
    )
    made, text = await store.create_key(terms, expires_at=int(NOON))
    other, _ = await store.create_key(KeyTerms(tenant="other"))
    found = await store.find_key(made.key_id)
    assert found == made
    assert found.terms == terms
    parts = split_key(text)
    assert parts is not None and found.proves(parts[1])
    assert await store.find_key("none") is None
    assert await store.list_keys("acme") == [made]
    assert {key.key_id for key in await store.list_keys()} == {made.key_id, other.key_id}
    revoked = await store.revoke_key(made.key_id)
    assert revoked is not None and revoked.revoked_at is not None
    assert await store.revoke_key(made.key_id) == revoked, "once is enough"
    assert await store.revoke_key("none") is None
    assert await store.find_key(other.key_id) == other


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


async def test_gateways_start_and_write_at_once(config: AccessConfig) -> None:
    stores = await asyncio.gather(*(AccessStore.open(config) for _ in range(4)))

    async def write(at: int) -> None:
        for batch in range(1, 6):
            await stores[at].add_usage([row()], writer=f"w{at}", batch=batch)

    await asyncio.gather(*(write(at) for at in range(4)))
    assert await stores[0].num_tokens(UsageFilter()) == 4 * 5 * 5
    for one in stores:
        await one.close()


@pytest.mark.processes
async def test_a_wrong_password_is_told_without_it(postgres: PostgresServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush hush")
    config = AccessConfig(database=postgres.new_database(), database_password_file=str(tmp_path / "password"))
    with pytest.raises(ConfigError, match="password") as refused:
        await AccessStore.open(config)
    assert "hush" not in refused.value.message


@pytest.mark.processes
@pytest.mark.parametrize(
    ("query", "told"), [("sslmode=require", "SSL"), ("sslmode=what", "ssl"), ("speed=high", "speed")]
)
async def test_parameters_of_the_url_reach_the_driver(postgres: PostgresServer, query: str, told: str) -> None:
    database = f"{postgres.new_database()}?{query}"
    with pytest.raises(ConfigError, match=told):
        await AccessStore.open(AccessConfig(database=database, database_password_file=str(postgres.password_file)))


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
    ledger = Ledger(lossy, writer="w", wall=lambda: NOON)
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
    now = NOON
    ledger = Ledger(store, writer="w", wall=lambda: now)
    ledger.add(key(), "m", ONE)
    now += DAY_S / 2
    ledger.add(key(), "m", ONE)
    await ledger.close()
    assert [one.day for one in await store.usage(UsageFilter())] == ["2026-11-30", "2026-12-01"]


async def test_what_cannot_be_written_at_the_end_is_told(caplog: pytest.LogCaptureFixture, store: AccessStore) -> None:
    lossy = LossyStore(store)
    lossy.losses = ["request"]
    ledger = Ledger(lossy, writer="w", wall=lambda: NOON)
    ledger.add(key(), "m", ONE)
    await ledger.close()
    (told,) = [record for record in caplog.records if record.message == "usage lost"]
    assert vars(told)["num_completion_tokens"] == 3
