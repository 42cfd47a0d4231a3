"""A process cluster whose components reach each other through proxies, and are held at failpoints from outside."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.cluster import FREE_PORTS
from deploy.launcher import ComponentKind, ComponentSpec, RestartPolicy
from tests.support.cluster import ProcessCluster
from tests.support.network import Network

HOLD_S = 30.0


@dataclass(frozen=True, slots=True)
class Held:
    """What is held at a failpoint."""

    point: str
    request_id: str
    """Empty where the point does not know."""


class Holds:
    """Arms one failpoint of one component, waits until somebody is there, lets go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = folder / "held"

    def actions(self, component: str, points: Iterable[str]) -> dict[str, str]:
        """For its configuration."""
        return {point: f"when:{self._armed(component, point)}:hold:{self._held}" for point in points}

    def _armed(self, component: str, point: str) -> Path:
        return self._folder / f"{component}.{point}"

    async def hold(self, component: str, point: str) -> Held:
        """The next one who comes there stays."""
        self._held.write_text("")
        armed = self._armed(component, point)
        armed.touch()
        until = time.monotonic() + HOLD_S
        while not (words := self._held.read_text().split()):
            assert time.monotonic() < until, f"nobody came to {point} of {component}"
            await asyncio.sleep(0.005)
        return Held(point, words[1] if len(words) > 1 else "")

    def let_go(self) -> None:
        self._held.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ProxiedCluster:
    cluster: ProcessCluster
    network: Network
    holds: Holds


@asynccontextmanager
async def proxied_cluster(folder: Path, *settings: str, points: Iterable[str]) -> AsyncIterator[ProxiedCluster]:
    """Everybody dials workers and the router through ``network``; the test itself dials the router directly. Workers
    keep their addresses over restarts, and everybody is restarted without a pause."""
    holds = Holds(folder)
    ports = iter(random.sample(FREE_PORTS, 100))
    bound: dict[str, int] = {}

    def edit(spec: ComponentSpec) -> ComponentSpec:
        spec = replace(spec, restart=RestartPolicy(initial_s=0, max_s=0))
        if spec.kind is ComponentKind.ROUTER:
            return spec
        config = json.loads(spec.argv[-1])
        config["router"]["listen"] = network.addresses["router"]
        if spec.kind is ComponentKind.WORKER:
            config["worker"] |= {"port": bound[spec.name], "advertise": network.addresses[spec.name]}
            config["failpoints"] |= holds.actions(spec.name, points)
        return replace(spec, argv=(*spec.argv[:-1], json.dumps(config)))

    cluster = ProcessCluster(folder / "logs", *settings, edit=edit)
    async with Network(cluster.pids) as network:
        await network.front("router", cluster.config.router.listen)
        for model in cluster.config.models:
            for role, pool in model.pools.items():
                for name in (f"{role}-{index}" for index in range(pool.replicas)):
                    bound[name] = next(ports)
                    await network.front(name, f"127.0.0.1:{bound[name]}")
        (folder / "logs").mkdir(exist_ok=True)
        async with cluster:
            yield ProxiedCluster(cluster, network, holds)
