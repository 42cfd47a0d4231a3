"""What only a file can be: locked, of another version."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from core.access_config import AccessConfig
from core.errors import ConfigError
from gateway.access.errors import StoreAway
from gateway.access.keys import KeyTerms
from gateway.access.store import AccessStore


async def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    config = AccessConfig(database=str(tmp_path / "keys.db"))
    await (await AccessStore.open(config)).close()
    with sqlite3.connect(tmp_path / "keys.db") as connection:
        connection.execute("UPDATE baton_schema SET version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="version 99"):
        await AccessStore.open(config)


async def test_a_locked_database_is_a_bounded_wait(tmp_path: Path) -> None:
    config = AccessConfig(database=str(tmp_path / "keys.db"), database_timeout_s=2)
    store, reader = await AccessStore.open(config), await AccessStore.open(config)
    blocker = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        async with asyncio.timeout(20):
            with pytest.raises(StoreAway):
                await store.create_key(KeyTerms(tenant="a"))
            with pytest.raises(StoreAway, match="a moment ago"):
                await store.list_keys()  # at once
            assert await reader.list_keys() == [], "readers do not wait for the writer"
    finally:
        blocker.close()
        await store.close()
        await reader.close()
