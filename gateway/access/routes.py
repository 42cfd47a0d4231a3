"""The routes of an operator, behind the admin key: keys and usage. And what a tenant may read of its own usage."""

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import date
from urllib.parse import parse_qsl

from pydantic import Field

from core.config import LimitsConfig
from core.errors import InvalidRequest
from gateway.access.errors import AccessUnknown, StoreAway
from gateway.access.keys import KEY_ID, NAME_PATTERN, KeyRecord, KeyTerms
from gateway.access.ledger import Ledger
from gateway.access.store import SECONDS_A_DAY, AccessStore, UsageFilter, UsageRow
from gateway.edge import Exchange
from gateway.http import NotFound, Receive, Scope, Send, read_json_body, send_json
from gateway.json_body import load_object
from gateway.schemas import validated

BODY_LIMITS = LimitsConfig(max_body_bytes=65_536)
MAX_DAYS = 36_500
NUMBERS = ("num_requests", "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens")


class NewKey(KeyTerms):
    """The terms, and how long they hold."""

    expires_in_days: float | None = Field(default=None, gt=0, le=MAX_DAYS)

    def terms(self) -> KeyTerms:
        return KeyTerms.model_validate(self.model_dump(exclude={"expires_in_days"}))

    def expires_at(self, now: float) -> int | None:
        return None if self.expires_in_days is None else int(now + SECONDS_A_DAY * self.expires_in_days)


class AccessRoutes:
    """`own_usage` is for every key, all others are for the admin key."""

    def __init__(self, store: AccessStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    async def create_key(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        body = validated(NewKey, load_object(await read_json_body(scope, receive, BODY_LIMITS)))
        async with _answering():
            record, text = await self._store.create_key(body.terms(), expires_at=body.expires_at(time.time()))
        exchange.fields["created_key"] = record.key_id
        no_store = ((b"cache-control", b"no-store"),)
        await send_json(send, 201, {**key_value(record), "key": text}, no_store)

    async def list_keys(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        query = _query(scope, "tenant")
        async with _answering():
            records = await self._store.list_keys(query["tenant"])
        await send_json(send, 200, {"object": "list", "data": [key_value(record) for record in records]})

    async def show_key(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async with _answering():
            record = await self._store.find_key(_key_id(scope))
        await send_json(send, 200, key_value(_found(record)))

    async def revoke_key(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async with _answering():
            record = await self._store.revoke_key(_key_id(scope))
        exchange.fields["revoked_key"] = _found(record).key_id
        await send_json(send, 200, key_value(_found(record)))

    async def all_usage(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        query = _query(scope, "tenant", "key", "since", "until")
        await self._send_usage(send, query, query["tenant"])

    async def own_usage(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Of the tenant that asks, with all its keys."""
        await self._send_usage(send, _query(scope, "key", "since", "until"), exchange.caller.tenant)

    async def _send_usage(self, send: Send, query: dict[str, str], tenant: str) -> None:
        which = UsageFilter(tenant=tenant, key_id=query["key"], since=query["since"], until=query["until"])
        async with _answering():
            await self._ledger.flush()
            rows = await self._store.usage(which)
        await send_json(send, 200, usage_value(rows))


def key_value(record: KeyRecord) -> dict[str, object]:
    """A key for people and programs. Without its secret: nobody has it."""
    return {
        "id": record.key_id,
        "object": "api_key",
        **record.terms.model_dump(mode="json"),
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
    }


def usage_value(rows: Sequence[UsageRow]) -> dict[str, object]:
    """Rows by day, tenant, key and model, and their sums."""
    sums = [sum(column) for column in zip(*(numbers_of(row) for row in rows), strict=True)] or [0] * len(NUMBERS)
    return {"object": "list", "data": [asdict(row) for row in rows], "total": dict(zip(NUMBERS, sums, strict=True))}


def numbers_of(row: UsageRow) -> tuple[int, ...]:
    return tuple(getattr(row, name) for name in NUMBERS)


def check_day(text: str, param: str) -> str:
    """A day, or no text at all. Raises InvalidRequest."""
    try:
        return "" if not text else date.fromisoformat(text).isoformat()
    except ValueError:
        raise InvalidRequest(
            f"'{param}' must be a day such as 2026-11-30 (UTC)", param=param, code="invalid_value"
        ) from None


def _check_tenant(text: str, param: str) -> str:
    if text and not re.fullmatch(NAME_PATTERN, text):
        raise InvalidRequest(f"'{param}' is no name of a tenant", param=param, code="invalid_value")
    return text


def _check_key_id(text: str, param: str) -> str:
    if text and not KEY_ID.fullmatch(text):
        raise InvalidRequest(
            f"'{param}' is no id of a key; those have 12 hexadecimal digits", param=param, code="invalid_value"
        )
    return text


PARAMETERS = {"tenant": _check_tenant, "key": _check_key_id, "since": check_day, "until": check_day}


def _query(scope: Scope, *names: str) -> dict[str, str]:
    """The parameters behind the path, by `names`; "" for one that is not given. Raises InvalidRequest, also for one
    that is not known: it would not filter."""
    try:
        query = dict(parse_qsl(scope["query_string"].decode("ascii"), keep_blank_values=True, max_num_fields=32))
    except ValueError:
        raise InvalidRequest("the query string is not valid") from None
    for name in query:
        if name not in names:
            raise InvalidRequest(f"this call has no parameter of this name; known: {', '.join(names)}", param=name[:64])
    return {name: PARAMETERS[name](query.get(name, ""), name) for name in names}


def _key_id(scope: Scope) -> str:
    """Of the path. What is no id is no key: the database is not asked."""
    key_id: str = scope["path_params"]["key_id"]
    if not KEY_ID.fullmatch(key_id):
        raise NotFound("there is no key of this id")
    return key_id


def _found(record: KeyRecord | None) -> KeyRecord:
    if record is None:
        raise NotFound("there is no key of this id")
    return record


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """A database that is away is a 503; why is for our log alone."""
    try:
        yield
    except StoreAway:
        raise AccessUnknown("the database of API keys does not answer; try again shortly", retry_after_s=2) from None
