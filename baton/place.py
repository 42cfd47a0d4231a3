"""``baton place``: keep the pools of a cell at their sizes, where router and gateways are run by somebody else."""

import asyncio
import tempfile
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

from baton.stop_signals import StopSignals
from baton.up import make_launcher
from core.config import ClusterConfig
from core.credentials import open_credentials
from core.security_config import Identity
from deploy.cluster import worker_of
from deploy.kubernetes import KubernetesApi, KubernetesPools
from deploy.launcher import ComponentEvent, Launcher, LaunchError
from deploy.pools import PoolKeeper
from rpc.clients import RouterClient


def place(config: ClusterConfig) -> int:
    """Returns once it was told to stop: with Kubernetes everything stays as it is, any other launcher ends what it
    started. Raises ConfigError and LaunchError."""
    with StopSignals() as signals:
        asyncio.run(_run(config, signals))
    return 0


async def _run(config: ClusterConfig, signals: StopSignals) -> None:
    try:
        if config.launcher.kind == "kubernetes":
            await _size(config, signals)
        else:
            await _launch(config, signals)
    except asyncio.CancelledError:
        if not signals.was_told_to_stop:
            raise
    finally:
        signals.detach()


async def _size(config: ClusterConfig, signals: StopSignals) -> None:
    await signals.attach(hurry=lambda: None)
    api = KubernetesApi(config.launcher.kubernetes)
    try:
        async with RouterClient(config.router.address, open_credentials(config.security, Identity.OPERATOR)) as router:
            await KubernetesPools(config, api, say=_say).run(router)
    finally:
        await api.close()


async def _launch(config: ClusterConfig, signals: StopSignals) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        launcher = make_launcher(config, run_dir=Path(folder), log_dir=logs)
        await signals.attach(hurry=launcher.kill)

        async with (
            launcher,
            RouterClient(config.router.address, open_credentials(config.security, Identity.OPERATOR)) as router,
        ):
            pools = PoolKeeper(config, launcher, partial(worker_of, config), say=_say)
            try:
                await pools.start()
                await _until_one_ends(pools.run(router), _follow(launcher, pools))
            finally:
                signals.begin_stop()


async def _follow(launcher: Launcher, pools: PoolKeeper) -> None:
    async for event in launcher.events():
        pools.note(event)
        _tell(event)
    raise LaunchError("the launcher has ended")


async def _until_one_ends(*works: Coroutine[object, object, None]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell(event: ComponentEvent) -> None:
    _say(f"{event.component}: {event.state}{f', {event.message}' if event.message else ''}")


def _say(text: str) -> None:
    print(text, flush=True)
