"""From a configuration to processes: which components a cluster has."""

import random
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from core.config import ClusterConfig, ModelConfigSection, PoolConfig, config_to_json, split_address
from core.credentials import open_credentials
from core.errors import ConfigError
from core.security_config import Identity
from core.types import Role
from deploy.launcher import ComponentEvent, ComponentKind, ComponentResources, ComponentSpec, Launcher
from deploy.pools import PoolKeeper
from rpc.clients import RouterClient

NOTHING = ComponentResources()
CLOSE_S = 2.0
"""What a gateway needs to end its streams after its drain."""
FREE_PORTS = range(20000, 32000)
"""Where ports are chosen for components that others must find: above Ray's worker ports (10002-19999) and below the
kernel's ephemeral ones, so that no outgoing connection takes a port between our look and the component's bind."""


def resolve_ports(config: ClusterConfig) -> ClusterConfig:
    """The same configuration with a number for each port 0 of the router's and the gateway's listen address.

    Others must know these addresses before the process is there, and again after it was restarted.
    Raises ConfigError for an address that is taken or not of this machine.
    """
    router = config.router.model_copy(update={"listen": _resolve("router.listen", config.router.listen)})
    gateway = config.gateway.model_copy(update={"listen": _resolve("gateway.listen", config.gateway.listen)})
    if router.listen == gateway.listen:
        raise ConfigError(f"router.listen and gateway.listen are both {router.listen}; give them different ports")
    return config.model_copy(update={"router": router, "gateway": gateway})


def router_spec(config: ClusterConfig) -> ComponentSpec:
    return _spec("router", ComponentKind.ROUTER, config)


def gateway_specs(config: ClusterConfig) -> tuple[ComponentSpec, ...]:
    """All gateway processes. A single one is called ``gateway``.

    Their drain ends before the launcher's patience: running streams end by an error in the stream, not by a cut.
    """
    drain_s = min(config.gateway.limits.drain_s, max(0.0, _grace_s(config) - CLOSE_S))
    limits = config.gateway.limits.model_copy(update={"drain_s": drain_s})
    gateway = config.gateway.model_copy(update={"limits": limits})
    config = config.model_copy(update={"gateway": gateway})
    if gateway.processes == 1:
        return (_spec("gateway", ComponentKind.GATEWAY, config),)
    names = [f"gateway-{index}" for index in range(gateway.processes)]
    return tuple(_spec(name, ComponentKind.GATEWAY, config, ("--gateway-id", name)) for name in names)


def worker_spec(config: ClusterConfig, model: ModelConfigSection, role: Role, index: int) -> ComponentSpec:
    """Worker number ``index`` of the pool of ``model`` and ``role``; its name is its worker id. It may leave: whoever
    drains it wants it to go."""
    pool = model.pools[role]
    prefix = "" if len(config.models) == 1 else re.sub(r"[^A-Za-z0-9._-]+", "-", model.name) + "."
    name = f"{prefix}{role}-{index}"
    argv = ("--model", model.name, "--role", str(role), "--worker-id", name)
    spec = _spec(name, ComponentKind.WORKER, config, argv, _resources(pool))
    return replace(spec, restart=replace(spec.restart, may_leave=True))


def worker_of(config: ClusterConfig, section: ModelConfigSection, role: Role, number: int) -> ComponentSpec:
    """``section`` is the configuration's own, or that of a later revision."""
    models = tuple(section if model.name == section.name else model for model in config.models)
    return worker_spec(config.model_copy(update={"models": models}), section, role, number)


class Cluster:
    """Starts the components of one configuration on a launcher and keeps pools at their desired sizes."""

    def __init__(
        self, config: ClusterConfig, launcher: Launcher, *, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._pools = PoolKeeper(config, launcher, partial(worker_of, config), say=say)

    async def start(self) -> tuple[str, ...]:
        """Start everything; who needs whom is settled by their own retries. Returns the names, in a reader's order."""
        await self._launcher.start(router_spec(self._config))
        gateways = gateway_specs(self._config)
        for gateway in gateways:
            await self._launcher.start(gateway)
        await self._pools.start()
        return ("router", *(gateway.name for gateway in gateways), *self._pools.names)

    def note(self, event: ComponentEvent) -> None:
        """To be told every event of the launcher."""
        self._pools.note(event)

    async def keep(self) -> None:
        """Bring pools to the sizes that the router says, whenever they change; until cancelled."""
        credentials = open_credentials(self._config.security, Identity.OPERATOR)
        async with RouterClient(self._config.router.address, credentials) as router:
            await self._pools.run(router)


def _spec(
    name: str,
    kind: ComponentKind,
    config: ClusterConfig,
    argv: tuple[str, ...] = (),
    resources: ComponentResources = NOTHING,
) -> ComponentSpec:
    command = (sys.executable, "-m", "baton.process", str(kind), *argv)
    return ComponentSpec(
        name=name,
        kind=kind,
        argv=(*command, "--config-json", config_to_json(config)),
        resources=resources,
        grace_s=_grace_s(config),
    )


def _grace_s(config: ClusterConfig) -> float:
    return max(1.0, config.launcher.stop_s - 2)


def _resources(pool: PoolConfig) -> ComponentResources:
    asked = pool.resources
    return ComponentResources(num_cpus=asked.num_cpus, num_gpus=asked.num_gpus, custom=asked.custom)


def _resolve(key: str, listen: str) -> str:
    host, port = split_address(listen)
    if port != 0:
        _try_bind(key, host, port)
        return listen
    for candidate in random.sample(FREE_PORTS, 50):
        if _is_free(host, candidate):
            return f"{host}:{candidate}"
    raise ConfigError(f"{key}: no free port found for {host}; name one that is free")


def _try_bind(key: str, host: str, port: int) -> None:
    try:
        _bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port} ({error.strerror or error}); "
            f"stop the program that has the port, or choose another: --set {key}={host}:{port + 1}"
        ) from None


def _is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
