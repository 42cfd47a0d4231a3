"""A cluster of plain processes on free ports of this machine, for benches: ``async with running(config) as live``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from core.config import ClusterConfig, load_config
from deploy.cluster import Cluster, resolve_ports
from deploy.launcher import ComponentState, LaunchError
from deploy.process import ProcessLauncher

READY_POLL_S = 0.2
FREE_PORTS = ("gateway.listen=127.0.0.1:0", "router.listen=127.0.0.1:0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Where a running cluster is."""

    url: str
    router: str
    model: str


@asynccontextmanager
async def running(config: ClusterConfig) -> AsyncIterator[Live]:
    """Ready when entered, ended when left. Raises LaunchError when a process does not come up."""
    config = resolve_ports(config)
    url = f"http://{config.gateway.listen}"
    async with ProcessLauncher() as launcher:
        names = set(await Cluster(config, launcher).start())
        async for event in launcher.events():
            if event.state is ComponentState.FAILED:
                raise LaunchError(f"{event.component}: {event.message}")
            if event.state is ComponentState.READY:
                names.discard(event.component)
                if not names:
                    break
        async with asyncio.timeout(config.launcher.start_timeout_s), httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{url}/ready")).is_error:
                await asyncio.sleep(READY_POLL_S)
        yield Live(url=url, router=config.router.listen, model=config.models[0].name)


def config_of(*settings: str) -> ClusterConfig:
    return load_config(overrides=[*FREE_PORTS, *settings])
