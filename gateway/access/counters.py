"""Where rates and running requests are counted: in this process, or in a store that many gateways share.

A call to the store is bounded in time. One that fails is not tried again for a moment, so that a store that is away
costs each gateway one short wait a second and not one for each request; what happens meanwhile is a setting.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from limits.aio.storage import RedisStorage

from core.access_config import STORE_PASSWORD, AccessConfig
from core.clock import Clock
from core.config import read_secret
from core.errors import ConfigError
from gateway.access.errors import AccessUnknown, OnStoreFailure, StoreAway, StoreFailure, nobody_hears
from gateway.access.shared_tally import RENEW_S, SharedTally
from gateway.access.tally import LocalTally, Tally
from gateway.access.windows import Memory, Windows

log = logging.getLogger(__name__)

AWAY_PAUSE_S = 1.0
RETRY_AFTER_S = 2.0
MAX_CONNECTIONS = 32
"""Of one gateway. Calls beyond them wait, a fraction of a millisecond each."""
T = TypeVar("T")


class Counters:
    """One place to count: `windows` for rates, `tally` for what runs and for budgets."""

    def __init__(self, windows: Windows, tally: Tally) -> None:
        self.windows = windows
        self.tally = tally

    async def run(self, work: Callable[["Counters"], Awaitable[T]]) -> T:
        """Raises StoreAway."""
        return await work(self)


class SharedCounters(Counters):
    """In Redis or Valkey. Make it on the event loop that uses it."""

    def __init__(self, config: AccessConfig, wall: Callable[[], float]) -> None:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(
                "gateway.access.limits_store names a store, but its client is not installed: pip install "
                "'baton-serve[redis]'"
            ) from None
        options: dict[str, Any] = {
            "password": read_secret(STORE_PASSWORD, config.limits_password_file),
            "max_connections": MAX_CONNECTIONS,
            "timeout": config.store_timeout_s,
            "socket_timeout": config.store_timeout_s,
            "socket_connect_timeout": config.store_timeout_s,
            "retry": Retry(NoBackoff(), 0),
        }
        url = config.limits_store.replace("valkey", "redis", 1)
        self._failures = (RedisError, OSError)
        self._timeout_s = config.store_timeout_s
        self.on_failure: OnStoreFailure = nobody_hears
        self._redis = Redis(connection_pool=BlockingConnectionPool.from_url(url, **options))
        storage = RedisStorage(
            f"async+{url}",
            implementation="redispy",
            key_prefix="baton:rate",
            connection_pool=self._redis.connection_pool,  # type: ignore[arg-type]  # its types forget this option
        )
        super().__init__(Windows(storage, wall), SharedTally(self._redis))

    async def run(self, work: Callable[[Counters], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work(self)
        except TimeoutError:
            self.on_failure(StoreFailure.TIMEOUT)
            raise StoreAway("the store of limits", f"no answer within {self._timeout_s:g} s") from None
        except self._failures as error:
            self.on_failure(StoreFailure.ERROR)
            raise StoreAway("the store of limits", f"{type(error).__name__}: {error}") from error

    async def renew(self) -> None:
        """Never ends by itself."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self.run(lambda counters: counters.tally.renew())
            except StoreAway as error:
                log.debug("running requests not renewed", extra={"reason": str(error)})

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


class CounterChoice:
    """The shared counters while they answer. While they do not: ``open`` counts here, ``closed`` refuses."""

    def __init__(self, *, local: Counters, shared: SharedCounters | None, is_open_on_loss: bool, clock: Clock) -> None:
        self._local = local
        self._shared = shared
        self._is_open_on_loss = is_open_on_loss
        self._clock = clock
        self._away_until: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the shared counters answered when they were last asked."""
        return self._shared is not None and self._away_until is None

    async def run(self, work: Callable[[Counters], Awaitable[T]]) -> T:
        """The result of `work` on one of the two. Raises AccessUnknown."""
        shared = self._shared
        if shared is None:
            return await self._local.run(work)
        if self._away_until is None or self._clock.now() >= self._away_until:
            try:
                result = await shared.run(work)
            except StoreAway as error:
                if self._away_until is None:
                    log.warning("limits are not shared", extra={"reason": str(error), "open": self._is_open_on_loss})
                self._away_until = self._clock.now() + AWAY_PAUSE_S
            else:
                if self._away_until is not None:
                    log.info("limits are shared again")
                self._away_until = None
                return result
        if self._is_open_on_loss:
            return await self._local.run(work)
        raise AccessUnknown("limits cannot be checked at the moment; try again shortly", retry_after_s=RETRY_AFTER_S)


def local_counters(wall: Callable[[], float]) -> Counters:
    return Counters(Windows(Memory(), wall), LocalTally(wall))
