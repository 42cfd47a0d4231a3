"""Keys are cached for a stated time; a database that is away follows the setting and is not asked by everybody."""

from __future__ import annotations

import asyncio

import pytest

from core.clock import ManualClock
from gateway.access import keyring
from gateway.access.errors import AccessUnknown, StoreAway
from gateway.access.keyring import KeyRing
from gateway.access.keys import KeyRecord, KeyTerms, PriorityClass, hash_secret, key_text, new_key, split_key


def record(key_id: str) -> KeyRecord:
    terms = KeyTerms(tenant="acme")
    return KeyRecord(key_id=key_id, secret_hash=b"", terms=terms, created_at=0, expires_at=None, revoked_at=None)


class Database:
    """Knows keys whose id begins with 'k'."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def find_key(self, key_id: str) -> KeyRecord | None:
        self.asked.append(key_id)
        await self.gate.wait()
        if self.is_away:
            raise StoreAway("database", "scripted")
        return record(key_id) if key_id.startswith("k") else None


def ring(database: Database, *, is_open: bool = False) -> tuple[KeyRing, ManualClock]:
    clock = ManualClock()
    return KeyRing(database, cache_s=5, is_open_on_loss=is_open, clock=clock), clock


async def test_a_key_is_asked_for_once_in_the_stated_time() -> None:
    database = Database()
    keys, clock = ring(database)
    for _ in range(3):
        assert await keys.find("k1") == record("k1")
        assert await keys.find("none") is None
    clock.advance(5.01)
    await keys.find("k1")
    assert database.asked == ["k1", "none", "k1"]


async def test_a_crowd_at_once_asks_a_few_times() -> None:
    database = Database()
    keys, _ = ring(database)
    database.gate.clear()
    waiting = [asyncio.ensure_future(keys.find("k1")) for _ in range(100)]
    while not database.asked:
        await asyncio.sleep(0)
    database.gate.set()
    assert set(map(repr, await asyncio.gather(*waiting))) == {repr(record("k1"))}
    assert len(database.asked) <= keyring.MAX_LOOKUPS


@pytest.mark.parametrize("is_open", [True, False])
async def test_without_the_database_the_setting_decides(is_open: bool) -> None:
    database = Database()
    keys, clock = ring(database, is_open=is_open)
    await keys.find("k1")
    database.is_away = True
    assert await keys.find("k1") == record("k1"), "what is fresh needs no database"
    clock.advance(6)
    if is_open:
        assert await keys.find("k1") == record("k1")
    else:
        with pytest.raises(AccessUnknown):
            await keys.find("k1")
    for _ in range(20):
        with pytest.raises(AccessUnknown):
            await keys.find("k2")  # never let in unknown
    assert len(database.asked) <= 3, "a database that is away is left alone"
    database.is_away = False
    clock.advance(keyring.AWAY_PAUSE_S)
    assert await keys.find("k2") == record("k2")


async def test_made_up_keys_do_not_displace_true_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "MAX_CACHED", 10)
    database = Database()
    keys, _ = ring(database)
    for number in range(9):
        await keys.find(f"k{number}")
    for number in range(50):
        await keys.find(f"x{number}")
    database.asked.clear()
    for number in range(9):
        await keys.find(f"k{number}")
    assert database.asked == []


def test_a_key_is_proved_by_its_secret_alone() -> None:
    key_id, secret = new_key()
    key = KeyRecord(
        key_id=key_id,
        secret_hash=hash_secret(key_id, secret),
        terms=KeyTerms(tenant="a"),
        created_at=0,
        expires_at=None,
        revoked_at=None,
    )
    assert split_key(key_text(key_id, secret)) == (key_id, secret)
    assert key.proves(secret)
    assert not key.proves(secret[:-1])
    assert not key.proves("")
    assert hash_secret("another", secret) != key.secret_hash
    assert secret not in repr(key)
    assert "secret_hash" not in repr(key)


def test_priority_classes_never_mix() -> None:
    asked = [-(1 << 31), -5, 0, 5, (1 << 31) - 1]
    ranks = [
        [one.rank(each) for each in asked] for one in (PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW)
    ]
    assert max(ranks[0]) < min(ranks[1])
    assert max(ranks[1]) < min(ranks[2])
    assert all(row == sorted(row) for row in ranks)
    assert all(-(1 << 31) <= rank < 1 << 31 for row in ranks for rank in row)
