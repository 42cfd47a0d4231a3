"""Puts access together at start, and takes it apart at the end."""

import logging
import time
from collections.abc import Callable
from functools import partial

from core.access_config import ADMIN_KEY, AccessConfig
from core.clock import Clock, MonotonicClock
from core.config import read_secret
from core.errors import ConfigError
from core.ids import Incarnation, format_incarnation
from core.tasks import TaskScope
from gateway.access.counters import CounterChoice, SharedCounters, local_counters
from gateway.access.gate import Gate, KeyGate, OpenGate
from gateway.access.key_file import KeyFile
from gateway.access.ledger import Ledger
from gateway.access.routes import AccessRoutes
from gateway.access.store import AccessStore
from gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

MIN_ADMIN_KEY_CHARS = 16


class Access:
    """The gate, the routes of access (None: without keys there are none), and what lives beside them."""

    gate: Gate
    routes: AccessRoutes | None = None
    has_admin: bool = False
    are_metrics_open: bool = True

    def start(self, metrics: GatewayMetrics, on_broken: Callable[[BaseException], None]) -> None:
        """Begins the tasks. `on_broken` is told of one that died."""

    async def close(self) -> None:
        """Writes what is left. No request may be running any more."""


class OpenAccess(Access):
    """Without keys."""

    def __init__(self) -> None:
        self.gate = OpenGate()


class KeyAccess(Access):
    """With keys. Make it with :meth:`open`."""

    def __init__(
        self,
        config: AccessConfig,
        store: AccessStore,
        *,
        incarnation: Incarnation,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._config = config
        self._store = store
        self._key_file = None if config.keys_file is None else KeyFile(config.keys_file, store)
        self._shared = None if config.limits_store == "memory" else SharedCounters(config, wall)
        self._ledger = Ledger(store, writer=format_incarnation(incarnation), wall=wall)
        self._scope: TaskScope | None = None
        self._on_refusal: Callable[[str], None] = lambda reason: None
        self.are_metrics_open = config.open_metrics
        admin_key = _admin_key(config)
        self._gate = self.gate = KeyGate(
            config=config,
            store=store,
            finder=self._key_file,
            counters=CounterChoice(
                local=local_counters(wall),
                shared=self._shared,
                is_open_on_loss=config.on_store_loss == "open",
                clock=clock,
            ),
            ledger=self._ledger,
            admin_key=admin_key,
            clock=clock,
            wall=wall,
            on_refusal=lambda reason: self._on_refusal(reason),
        )
        self.routes = AccessRoutes(store, self._ledger)
        self.has_admin = admin_key is not None

    @classmethod
    async def open(
        cls,
        config: AccessConfig,
        *,
        incarnation: Incarnation,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
    ) -> "KeyAccess":
        """Raises ConfigError with the remedy."""
        store = await AccessStore.open(config)
        try:
            access = cls(config, store, incarnation=incarnation, clock=clock or MonotonicClock(), wall=wall)
            if not (access.has_key_file or await store.has_keys()):
                log.warning("there are no API keys yet: make one with `baton keys create --tenant NAME`")
        except ConfigError:
            await store.close()
            raise
        return access

    @property
    def has_key_file(self) -> bool:
        """Whether there is a file that holds a key."""
        return self._key_file is not None and self._key_file.has_keys

    def start(self, metrics: GatewayMetrics, on_broken: Callable[[BaseException], None]) -> None:
        self._on_refusal = metrics.observe_refusal
        self._store.on_failure = partial(metrics.observe_store_failure, "database")
        if self._shared is not None:
            self._shared.on_failure = partial(metrics.observe_store_failure, "limits")
        self._scope = TaskScope("access", on_failure=on_broken)
        self._scope.spawn(self._ledger.run(self._config.usage_flush_s), name="ledger")
        if self._shared is not None:
            self._scope.spawn(self._shared.renew(), name="renew")

    async def close(self) -> None:
        await self._gate.close()
        if self._scope is not None:
            await self._scope.close()
        await self._ledger.close()
        if self._shared is not None:
            await self._shared.close()
        await self._store.close()


async def open_access(config: AccessConfig, *, incarnation: Incarnation) -> Access:
    """What the configuration says. Raises ConfigError with the remedy."""
    if config.has_keys:
        return await KeyAccess.open(config, incarnation=incarnation)
    log.warning("no API keys are configured: only this machine is served, and nobody is asked for a key")
    return OpenAccess()


def _admin_key(config: AccessConfig) -> str | None:
    key = read_secret(ADMIN_KEY, config.admin_key_file)
    if key is not None and len(key) < MIN_ADMIN_KEY_CHARS:
        raise ConfigError(
            f"the admin key is shorter than {MIN_ADMIN_KEY_CHARS} characters and could be guessed: make one with "
            "`openssl rand -hex 32`"
        )
    return key
