"""The gateway process: bind, load, serve, drain on SIGTERM, exit 0."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
import uvloop

from core.config import ClusterConfig, split_address
from core.errors import ConfigError, InternalError
from core.ids import GatewayId, new_incarnation
from core.telemetry import Telemetry, setup_telemetry
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.ports import RpcClients
from rpc.clients import RouterClient

log = logging.getLogger(__name__)

BACKLOG = 2048
CLOSE_GRACE_S = 2


def run(
    config: ClusterConfig, *, gateway_id: str = "gateway-0", on_listening: Callable[[str], None] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError for what the operator has to mend.

    `on_listening` is told the HTTP address (``host:port``) once requests are accepted.
    """
    telemetry = setup_telemetry("gateway", config.telemetry)
    listener = _bind(config.gateway.listen)
    models = [ServedModel.load(section) for section in config.models]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, listener, models, telemetry, GatewayId(gateway_id), on_listening))


def _bind(listen: str) -> socket.socket:
    """Taken before the models are read, so that a wrong port is told at once."""
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    models: list[ServedModel],
    telemetry: Telemetry,
    gateway_id: GatewayId,
    on_listening: Callable[[str], None] | None,
) -> None:
    gateway = Gateway(
        config,
        router=RouterClient(config.router.listen),
        clients=RpcClients(),
        models=models,
        telemetry=telemetry,
        gateway_id=gateway_id,
        incarnation=new_incarnation(),
    )
    host, _ = split_address(config.gateway.listen)
    address = f"{host}:{listener.getsockname()[1]}"
    gateway.reporter.http_address = address
    gateway.reporter.pid = os.getpid()
    server = _Server(gateway)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    gateway.start(on_broken=stop.set)
    serving = loop.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        log.info("listening", extra={"address": address, "models": [model.name for model in models]})
        if on_listening is not None:
            on_listening(address)
        stopped = loop.create_task(stop.wait(), name="stop-signal")
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("draining")
        await gateway.drain()
    finally:
        server.should_exit = True
        try:
            await serving
        finally:
            await gateway.close()
        log.info("stopped")
    if gateway.is_broken:
        raise InternalError("the gateway's heartbeat failed; it must be restarted")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: draining comes first and is ours."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(
            uvicorn.Config(
                gateway.asgi,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=CLOSE_GRACE_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
