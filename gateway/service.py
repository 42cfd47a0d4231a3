"""The gateway process: bind, load, serve, drain on SIGTERM, exit 0."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

import uvloop

from core.config import ClusterConfig, split_address
from core.credentials import Credentials, open_credentials
from core.errors import ConfigError, InternalError
from core.ids import GatewayId, new_incarnation
from core.probes import ProbeServer
from core.security_config import Identity
from core.tasks import TaskScope
from core.telemetry import Telemetry, setup_telemetry
from gateway.access.assembly import open_access
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.ports import RpcClients
from gateway.server import BACKLOG, Server
from gateway.tls import Certificate
from rpc.clients import RouterClient

log = logging.getLogger(__name__)

GC_EVERY = 10_000
"""Objects more than before: hundreds of requests. Most of what a request makes goes with it, without a collection."""


def run(
    config: ClusterConfig,
    *,
    gateway_id: str = "gateway-0",
    on_listening: Callable[[Mapping[str, str]], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError for what the operator has to mend.

    `on_listening` is told the addresses (``host:port``) once requests are accepted: ``http``, and ``probes`` where
    those have a port of their own.
    """
    telemetry = setup_telemetry("gateway", config.telemetry)
    certificate = Certificate(config.gateway.tls) if config.gateway.tls is not None else None
    listener = _bind(config.gateway.listen, is_shared=config.gateway.processes > 1)
    credentials = open_credentials(config.security, Identity.GATEWAY)
    models = [ServedModel.load(section) for section in config.models]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            _serve(config, listener, certificate, credentials, models, telemetry, GatewayId(gateway_id), on_listening)
        )


def _bind(listen: str, *, is_shared: bool) -> socket.socket:
    """Taken before the models are read, so that a wrong port is told at once."""
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {listen} ({error.strerror}): free the port, or choose another with "
            "--set gateway.listen=HOST:PORT"
        ) from None
    listener.set_inheritable(True)
    return listener


async def _serve(
    config: ClusterConfig,
    listener: socket.socket,
    certificate: Certificate | None,
    credentials: Credentials | None,
    models: list[ServedModel],
    telemetry: Telemetry,
    gateway_id: GatewayId,
    on_listening: Callable[[Mapping[str, str]], None] | None,
) -> None:
    incarnation = new_incarnation()
    access = await open_access(config.gateway.access, incarnation=incarnation)
    gateway = Gateway(
        config,
        router=RouterClient(config.router.address, credentials),
        clients=RpcClients(credentials),
        models=models,
        telemetry=telemetry,
        gateway_id=gateway_id,
        incarnation=incarnation,
        access=access,
    )
    host, _ = split_address(config.gateway.listen)
    address = f"{host}:{listener.getsockname()[1]}"
    gateway.reporter.http_address = address
    gateway.reporter.pid = os.getpid()
    server = Server(gateway, config.gateway, certificate)
    stop = asyncio.Event()

    def on_signal() -> None:
        """The first signal begins to drain, the next one ends it at once."""
        if stop.is_set():
            gateway.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGINT, on_signal)
    gateway.start(on_broken=stop.set)
    upkeep = TaskScope("gateway-process")
    if certificate is not None:
        upkeep.spawn(certificate.follow(), name="certificate")
    probes = ProbeServer(ready=gateway.why_not_ready, metrics=telemetry.render_metrics)
    serving = loop.create_task(server.serve(sockets=[listener]), name="http-server")
    gc.collect()
    gc.freeze()  # the vocabulary stays: no collection need look at it
    gc.set_threshold(GC_EVERY)
    try:
        log.info("listening", extra={"address": address, "models": [model.name for model in models]})
        addresses = {"http": address}
        if config.gateway.http_listen != "auto":
            addresses["probes"] = await probes.start(config.gateway.http_listen)
        elif config.gateway.processes > 1:
            addresses["probes"] = await probes.start(f"{host}:0")
        if on_listening is not None:
            on_listening(addresses)
        stopped = loop.create_task(stop.wait(), name="stop-signal")
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("draining")
        await gateway.drain()
    finally:
        await probes.stop()
        server.should_exit = True
        try:
            await serving
        finally:
            await upkeep.close()
            await gateway.close()
        log.info("stopped")
    if gateway.is_broken:
        raise InternalError("the gateway's heartbeat failed; it must be restarted")
