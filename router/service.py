"""The router process: the cell's handler on its gRPC port, probes and metrics on its HTTP port."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from core.clock import Clock
from core.config import ClusterConfig
from core.credentials import open_credentials
from core.errors import InternalError, ServingError
from core.ids import format_incarnation
from core.probes import ProbeServer
from core.security_config import Identity
from core.telemetry import Telemetry, setup_telemetry
from router.handler import RouterHandler
from rpc.server import RpcServer

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
"""For running calls at a graceful stop. Membership streams never end by themselves, so it is always used up."""


class RouterServer:
    """The handler on its two ports. Used by ``run`` and, in one process with others, by tests."""

    def __init__(self, config: ClusterConfig, telemetry: Telemetry | None = None, clock: Clock | None = None) -> None:
        self._config = config
        self._telemetry = telemetry or Telemetry(component="router")
        self._is_serving = False
        self.handler = RouterHandler(config, self._telemetry, clock)
        self._rpc = RpcServer(open_credentials(config.security, Identity.ROUTER))
        self._rpc.add_router(self.handler)
        self._probes = ProbeServer(
            ready=lambda: None if self._is_serving else "starting or stopping",
            metrics=self._telemetry.render_metrics,
        )

    @property
    def address(self) -> str:
        """``host:port`` of the gRPC server, after the start."""
        return self._rpc.address

    @property
    def http_address(self) -> str:
        """``host:port`` of the probes, after the start."""
        return self._probes.address

    async def start(self) -> None:
        """Bind both ports and serve. Raises ConfigError, with nothing left running, when a port is taken."""
        self.handler.http_address = await self._probes.start(self._config.router.http_listen)
        try:
            await self._rpc.start(self._config.router.listen)
        except ServingError:
            await self._probes.stop()
            raise
        self.handler.start()
        self._is_serving = True

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new calls, give running ones ``grace_s``, end every task and both servers."""
        self._is_serving = False
        await self._rpc.stop(grace_s)
        await self.handler.close()
        await self._probes.stop()


async def run(config: ClusterConfig, *, announce: Callable[[Mapping[str, str]], None] = lambda addresses: None) -> None:
    """The router process: serve until SIGTERM or SIGINT, then stop within 2 s. Raises ConfigError at start.

    ``announce`` is told the addresses by protocol once they are served.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    server = RouterServer(config, setup_telemetry("router", config.telemetry))
    broken = asyncio.Event()

    def on_broken() -> None:
        broken.set()
        stopping.set()

    server.handler.on_broken = on_broken
    await server.start()
    log.info(
        "router serving",
        extra={
            "address": server.address,
            "http_address": server.http_address,
            "incarnation": format_incarnation(server.handler.incarnation),
        },
    )
    announce({"grpc": server.address, "http": server.http_address})
    await stopping.wait()
    log.info("router stopping")
    with suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            await server.stop()
    if broken.is_set():
        raise InternalError("the router's timekeeping failed; it must be restarted")
