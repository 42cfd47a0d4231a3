"""What a request passes on its way in and out: its key, its rates, its reservation; and at the end, the account.

key checked -> request counted -> (body read, job made) -> tokens reserved -> runs -> settled
"""

import math
from collections.abc import Callable
from typing import Protocol

from core.access_config import AccessConfig
from core.clock import Clock
from core.errors import NotAllowed, ServingError
from gateway.access.caller import Caller
from gateway.access.counters import CounterChoice, Counters
from gateway.access.errors import NotAuthenticated
from gateway.access.keyring import KeyFinder, KeyRing
from gateway.access.keys import KeyRecord, same_secret, split_key
from gateway.access.ledger import Ledger
from gateway.access.reservations import Demand, Reservations, Ticket, rate_limited, rate_name
from gateway.access.store import AccessStore
from gateway.access.windows import Reading
from gateway.console.sessions import Sessions, session_of
from gateway.edge import Exchange
from gateway.http import Scope, header


class Gate(Protocol):
    """`check_*` are the doors of routes: each raises, or lets the request of `exchange` through."""

    async def check_key(self, exchange: Exchange, scope: Scope) -> None: ...
    async def check_admin(self, exchange: Exchange, scope: Scope) -> None: ...
    async def check_console(self, exchange: Exchange, scope: Scope) -> None: ...
    @property
    def needs_key(self) -> bool: ...
    def new_session(self) -> str:
        """The value of a cookie that opens the console's door from now on."""

    async def reserve(self, exchange: Exchange, demand: Demand) -> Ticket: ...


class OpenGate:
    """Without keys: who reaches this machine's loopback address may do everything."""

    async def check_key(self, exchange: Exchange, scope: Scope) -> None:
        pass

    async def check_admin(self, exchange: Exchange, scope: Scope) -> None:
        pass

    async def check_console(self, exchange: Exchange, scope: Scope) -> None:
        pass

    needs_key = False

    def new_session(self) -> str:
        return ""

    async def reserve(self, exchange: Exchange, demand: Demand) -> Ticket:
        return Ticket(lambda usage: None)


class KeyGate:
    """With keys: those of `finder`, or of the store. `on_refusal` is told the reason of each refusal, one of a few
    words."""

    def __init__(
        self,
        *,
        config: AccessConfig,
        store: AccessStore,
        finder: KeyFinder | None = None,
        counters: CounterChoice,
        ledger: Ledger,
        admin_key: str | None,
        clock: Clock,
        wall: Callable[[], float],
        on_refusal: Callable[[str], None],
    ) -> None:
        is_open = config.on_store_loss == "open"
        self._ring = KeyRing(finder or store, cache_s=config.key_cache_s, is_open_on_loss=is_open, clock=clock)
        self._counters = counters
        self._admin_key = admin_key
        self._sessions = None if admin_key is None else Sessions(admin_key, wall)
        self._wall = wall
        self._on_refusal = on_refusal
        self._reservations = Reservations(
            config=config, store=store, counters=counters, ledger=ledger, wall=wall, on_refusal=on_refusal
        )

    async def close(self) -> None:
        """No request may be running any more."""
        await self._reservations.close()

    async def check_key(self, exchange: Exchange, scope: Scope) -> None:
        """Any key that holds now. Raises NotAuthenticated, RateLimited, AccessUnknown."""
        key = await self._authenticate(scope)
        exchange.caller = Caller(key=key)
        exchange.fields |= {"tenant": key.terms.tenant, "key_id": key.key_id}
        await self._count_request(exchange, key, num_requests=int(scope["method"] == "POST"))

    async def check_admin(self, exchange: Exchange, scope: Scope) -> None:
        """The admin key and no other."""
        given = _bearer(scope)
        if self._admin_key is not None and given is not None and same_secret(given, self._admin_key):
            exchange.fields["is_admin"] = True
            return
        await self._authenticate(scope)  # a stranger is not told that there is more
        raise self._refused("not_admin", NotAllowed("this needs the admin key"))

    async def check_console(self, exchange: Exchange, scope: Scope) -> None:
        """A session of the console, by GET only; or the admin key."""
        session = session_of(header(scope, b"cookie")) if scope["method"] == "GET" else ""
        if self._sessions is not None and session and self._sessions.holds(session):
            exchange.fields["is_admin"] = True
            return
        await self.check_admin(exchange, scope)

    needs_key = True

    def new_session(self) -> str:
        assert self._sessions is not None, "the door of the admin key was passed"
        return self._sessions.issue()

    async def reserve(self, exchange: Exchange, demand: Demand) -> Ticket:
        key = exchange.caller.key
        assert key is not None, "the door was passed"
        return await self._reservations.reserve(
            key, exchange.request_id, demand, lambda reading: _show(exchange, "tokens", reading)
        )

    async def _authenticate(self, scope: Scope) -> KeyRecord:
        text = _bearer(scope)
        if text is None:
            raise self._refused("no_key", NotAuthenticated("send an API key: 'Authorization: Bearer sk-baton-...'"))
        parts = split_key(text)
        key = None if parts is None else await self._ring.find(parts[0])
        if parts is None or key is None or not key.proves(parts[1]):
            raise self._refused("unknown_key", NotAuthenticated("the API key is not valid"))
        if not key.is_valid(self._wall()):
            why = "was revoked" if key.revoked_at is not None else "has expired"
            raise self._refused("ended_key", NotAuthenticated(f"the API key {why}"))
        return key

    async def _count_request(self, exchange: Exchange, key: KeyRecord, *, num_requests: int) -> None:
        """Reading something counts no request, but is told how the rates stand; over the rate, it is answered as
        well."""
        max_requests, max_tokens = key.terms.requests_per_minute, key.terms.tokens_per_minute
        if max_requests is None and max_tokens is None:
            return  # a store that is away is not this key's concern

        async def count(counters: Counters) -> tuple[Reading | None, Reading | None]:
            take, names = counters.windows.take, (rate_name(key, "requests"), rate_name(key, "tokens"))
            return (
                None if max_requests is None else await take(names[0], num_requests, max_requests),
                None if max_tokens is None else await take(names[1], 0, max_tokens),
            )

        requests, tokens = await self._counters.run(count)
        _show(exchange, "requests", requests)
        _show(exchange, "tokens", tokens)
        if requests is not None and requests.wait_s is not None:
            raise self._refused("requests_per_minute", rate_limited("requests", requests))

    def _refused(self, reason: str, error: ServingError) -> ServingError:
        self._on_refusal(reason)
        return error


def _bearer(scope: Scope) -> str | None:
    """The token of the Authorization header. Keys in query strings are not read: those end up in logs."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _show(exchange: Exchange, what: str, reading: Reading | None) -> None:
    """The headers that tell a client how a rate stands."""
    if reading is not None:
        values = {"limit": str(reading.limit), "remaining": str(reading.remaining), "reset": _words(reading.reset_s)}
        exchange.headers |= {f"x-ratelimit-{name}-{what}".encode(): value.encode() for name, value in values.items()}


def _words(seconds: float) -> str:
    """``1m30s``, as OpenAI writes durations."""
    minutes, rest = divmod(math.ceil(round(seconds, 3)), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
