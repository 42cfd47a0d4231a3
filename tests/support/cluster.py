"""A real cluster of real processes on loopback, for integration and fault tests. Nothing outlives ``async with``."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from core.config import ClusterConfig, load_config
from core.credentials import open_credentials
from core.errors import ServingError
from core.security_config import Identity
from core.types import ClusterStatus, WorkerState, WorkerStatus
from deploy.cluster import Cluster, resolve_ports
from deploy.launcher import ComponentEvent, ComponentSpec, ComponentState
from deploy.process import ProcessLauncher
from rpc.clients import RouterClient

MODEL = "smollm2-135m-instruct"
START_S = 90.0
_POLL_S = 0.05

SMALL = (
    "router.listen=127.0.0.1:0",
    "gateway.listen=127.0.0.1:0",
    "router.heartbeat_s=0.1",
    "router.mode=split",
    "router.max_wait_s=300",  # a slow machine refuses nobody: who has to wait, waits
    "router.heartbeat_timeout_s=2",
    "models.0.kv.num_blocks=400",
    "models.0.kv.prefault=false",
    "worker.drain_s=3",
)
"""Settings that make a cluster quick to start, small and quick to notice things."""


Edit = Callable[[ComponentSpec], ComponentSpec]
"""How a test has a component started in another way than the product does."""


class _EditingLauncher(ProcessLauncher):
    def __init__(self, log_dir: Path, edit: Edit) -> None:
        super().__init__(log_dir=log_dir)
        self._edit = edit

    async def start(self, spec: ComponentSpec) -> None:
        await super().start(self._edit(spec))


class ProcessCluster:
    """``async with ProcessCluster(tmp_path, "transfer.digest=off") as cluster``: ready when entered.

    ``is_kept``: pools are kept at their sizes as by ``baton up``; otherwise who is stopped stays away.
    """

    def __init__(self, log_dir: Path, *overrides: str, edit: Edit = lambda spec: spec, is_kept: bool = False) -> None:
        self.config: ClusterConfig = resolve_ports(load_config(overrides=[*SMALL, *overrides], environ={}))
        self._log_dir = log_dir
        self.launcher = _EditingLauncher(log_dir, edit)
        self._cluster = Cluster(self.config, self.launcher, say=self._say)
        self._is_kept = is_kept
        self._keeping: asyncio.Task[None] | None = None
        self.said: list[str] = []
        """What ``baton up`` would have printed about its pools."""
        self._events: list[ComponentEvent] = []
        self._reading: asyncio.Task[None] | None = None
        self.router = RouterClient(self.config.router.listen, open_credentials(self.config.security, Identity.OPERATOR))
        self.http = httpx.AsyncClient(base_url=self.url, timeout=600)

    @property
    def url(self) -> str:
        return f"http://{self.config.gateway.listen}"

    async def __aenter__(self) -> Self:
        await self.launcher.__aenter__()
        self._reading = asyncio.create_task(self._read_events())
        try:
            await self._cluster.start()
            await self.wait_ready(START_S)
            if self._is_kept:
                self._keeping = asyncio.create_task(self._cluster.keep())
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if error is not None:
            print(self.logs())

    async def _close(self) -> None:
        await self.http.aclose()
        await self.router.close()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self.launcher.close()
        if self._reading is not None:
            await self._reading

    async def _read_events(self) -> None:
        async for event in self.launcher.events():
            self._events.append(event)
            self._cluster.note(event)

    def _say(self, text: str) -> None:
        self.said.append(text)

    def logs(self) -> str:
        """The last lines of every component, for a failing test."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:])
            for path in sorted(self._log_dir.glob("**/*.log"))
        )

    def pid(self, component: str) -> int:
        """The process id of the last start of a component."""
        started = [e for e in self._events if e.component == component and e.state is ComponentState.STARTED]
        return started[-1].pid

    def pids(self) -> dict[str, int]:
        """Of every component, at its last start."""
        return {e.component: e.pid for e in self._events if e.state is ComponentState.STARTED}

    def ready_pid(self, component: str) -> int | None:
        """The last process of a component that said it serves."""
        ready = [e.pid for e in self._events if e.component == component and e.state is ComponentState.READY]
        return ready[-1] if ready else None

    def kill(self, component: str, signum: int = signal.SIGKILL) -> int:
        """Send a signal to a component's process; returns its pid."""
        pid = self.pid(component)
        os.kill(pid, signum)
        return pid

    # -- looking --------------------------------------------------------------------------------------------------

    async def status(self) -> ClusterStatus:
        return await self.router.status()

    async def worker(self, worker_id: str) -> WorkerStatus:
        for worker in (await self.status()).workers:
            if worker.registration.worker_id == worker_id and worker.state is not WorkerState.LOST:
                return worker
        raise KeyError(worker_id)

    async def wait_for(self, what: str, is_true: Callable[[ClusterStatus], bool], timeout_s: float) -> ClusterStatus:
        """Poll the router until ``is_true(status)``. Fails with the last status and the logs."""
        until = time.monotonic() + timeout_s
        status: ClusterStatus | None = None
        while time.monotonic() < until:
            try:
                status = await self.status()
                if is_true(status):
                    return status
            except ServingError:
                pass  # the router is starting
            failed = [e for e in self._events if e.state is ComponentState.FAILED and not self._is_kept]
            assert not failed, f"a component cannot run: {failed[0].message} {failed[0].tail}"
            await asyncio.sleep(_POLL_S)
        raise AssertionError(f"waited {timeout_s} s in vain for: {what}\n{status}\n{self.logs()}")

    async def wait_ready(self, timeout_s: float) -> None:
        """Every pool has its size, and the gateway says that it can serve."""
        await self.wait_for(
            "all workers ready", lambda status: all(pool.ready >= pool.desired for pool in status.pools), timeout_s
        )
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                if (await self.http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # the gateway is starting
            await asyncio.sleep(_POLL_S)
        raise AssertionError(f"the gateway did not become ready\n{self.logs()}")

    async def wait_idle(self, timeout_s: float = 20.0) -> ClusterStatus:
        """Laws 1 and 2: nothing is queued, running, held or reserved anywhere, and every block counts once."""

        def is_idle(status: ClusterStatus) -> bool:
            alive = [worker for worker in status.workers if worker.state is not WorkerState.LOST]
            for worker in alive:
                assert worker.load.blocks.is_conserved(), worker
            return status.num_waiting == status.num_placements == 0 and all(
                worker.load.blocks.is_idle()
                and worker.load.num_running == worker.load.num_waiting == worker.load.num_leases == 0
                and worker.load.num_transfers == 0
                for worker in alive
            )

        return await self.wait_for("an idle cluster", is_idle, timeout_s)

    # -- asking ---------------------------------------------------------------------------------------------------

    async def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A plain completion; greedy with token ids unless told otherwise. Raises for an error status."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def streamed_text(self, body: dict[str, Any]) -> str:
        """The joined deltas of a streamed chat."""
        parts: list[str] = []
        async with self.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    parts += [choice["delta"].get("content") or "" for choice in choices]
        return "".join(parts)

    def stop_later(self, component: str) -> "asyncio.Task[None]":
        """Stop a component for good (nobody restarts it); the task ends when its process is gone."""
        return asyncio.create_task(self._stop(component))

    async def _stop(self, component: str) -> None:
        self.kill(component)  # at once: a graceful stop would let it finish what it does
        await self.launcher.stop(component)
