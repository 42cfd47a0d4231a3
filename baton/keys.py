"""``baton keys``: works on the database of keys itself, whether gateways run or not."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import yaml
from pydantic import ValidationError

from baton.status import table
from core.config import ClusterConfig
from core.errors import ConfigError, InternalError, InvalidRequest
from gateway.access.errors import StoreAway
from gateway.access.keys import KeyRecord, hash_secret, key_text, new_key
from gateway.access.routes import NewKey, check_day, key_value, numbers_of, usage_value
from gateway.access.store import AccessStore, UsageFilter

NO_LIMIT = "-"


async def create_key(config: ClusterConfig, given: Mapping[str, object], *, as_json: bool) -> int:
    """Makes a key and prints it. Raises ConfigError for terms that are not valid."""
    new = _checked(given)
    async with _store(config) as store:
        record, text = await store.create_key(new.terms(), expires_at=new.expires_at(time.time()))
    if as_json:
        print(json.dumps({**key_value(record), "key": text}, indent=2))
    else:
        print(f"{_keys_table([record])}\n\n  {text}\n\nThis is the only time the key is shown.")
    return 0


def make_key(given: Mapping[str, object]) -> int:
    """Makes a key that is kept nowhere: prints it, and the entry for ``gateway.access.keys_file``, which has its hash
    only. Raises ConfigError for terms that are not valid."""
    new = _checked(given)
    key_id, secret = new_key()
    terms = new.terms().model_dump(mode="json", exclude_defaults=True)
    expires_at = new.expires_at(time.time())
    expiry = {} if expires_at is None else {"expires_at": expires_at}
    entry = {"id": key_id, "sha256": hash_secret(key_id, secret).hex(), **terms, **expiry}
    print(f"# The key, this once: {key_text(key_id, secret)}\n# An entry of `keys:` in gateway.access.keys_file:")
    print(yaml.safe_dump([entry], sort_keys=False), end="")
    return 0


def _checked(given: Mapping[str, object]) -> NewKey:
    try:
        return NewKey.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        option = "--" + str(first["loc"][0] if first["loc"] else "tenant").replace("_", "-")
        raise ConfigError(f"{option}: {first['msg']}") from None


async def list_keys(config: ClusterConfig, tenant: str, *, as_json: bool) -> int:
    async with _store(config) as store:
        records = await store.list_keys(tenant)
    if as_json:
        print(json.dumps([key_value(record) for record in records], indent=2))
    else:
        print(_keys_table(records) if records else "no keys; make one with `baton keys create --tenant NAME`")
    return 0


async def revoke_key(config: ClusterConfig, key_id: str, *, as_json: bool) -> int:
    """Raises ConfigError when there is no such key."""
    async with _store(config) as store:
        record = await store.revoke_key(key_id)
    if record is None:
        raise ConfigError(f"there is no key {key_id!r}; `baton keys list` shows the ids")
    if as_json:
        print(json.dumps(key_value(record), indent=2))
    else:
        print(
            f"{key_id} of {record.terms.tenant} is revoked; gateways refuse it within "
            f"{config.gateway.access.key_cache_s:g} s"
        )
    return 0


async def show_usage(config: ClusterConfig, which: Mapping[str, str], *, as_json: bool) -> int:
    try:
        days = {name: check_day(which[name], name) for name in ("since", "until")}
    except InvalidRequest as error:
        raise ConfigError(error.message) from None
    async with _store(config) as store:
        rows = await store.usage(UsageFilter(tenant=which["tenant"], key_id=which["key_id"], **days))
    value = usage_value(rows)
    if as_json:
        print(json.dumps(value, indent=2))
        return 0
    lines = [
        tuple(str(cell) for cell in (row.day, row.tenant, row.key_id, row.model, *numbers_of(row))) for row in rows
    ]
    total = value["total"]
    assert isinstance(total, dict)
    lines.append(("total", "", "", "", *(str(number) for number in total.values())))
    print(table(("DAY", "TENANT", "KEY", "MODEL", "REQUESTS", "PROMPT", "OF IT CACHED", "ANSWER"), lines))
    return 0


@asynccontextmanager
async def _store(config: ClusterConfig) -> AsyncIterator[AccessStore]:
    store = await AccessStore.open(config.gateway.access)
    try:
        yield store
    except StoreAway as error:
        raise InternalError(str(error)) from None
    finally:
        await store.close()


def _keys_table(records: list[KeyRecord]) -> str:
    return table(
        (
            "ID",
            "TENANT",
            "NAME",
            "STATE",
            "MODELS",
            "PRIORITY",
            "REQ/MIN",
            "TOK/MIN",
            "AT ONCE",
            "TOK/DAY",
            "TOK/MONTH",
        ),
        [_row(record) for record in records],
    )


def _row(record: KeyRecord) -> tuple[str, ...]:
    terms = record.terms
    rates = (terms.requests_per_minute, terms.tokens_per_minute, terms.max_streams)
    amounts = (*rates, terms.tokens_per_day, terms.tokens_per_month)
    models = "all" if terms.models is None else ",".join(terms.models)
    numbers = (NO_LIMIT if amount is None else str(amount) for amount in amounts)
    return (record.key_id, terms.tenant, terms.name or "-", _state(record), models, terms.priority, *numbers)


def _state(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return "revoked"
    if record.expires_at is None:
        return "valid"
    day = datetime.fromtimestamp(record.expires_at, UTC).strftime("%Y-%m-%d %H:%M")
    return f"until {day}" if record.is_valid(time.time()) else "expired"
