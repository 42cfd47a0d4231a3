"""Plain supervised processes on this machine: for tests and for hosts without Ray."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.launcher import ComponentEvent, ComponentSpec, LaunchError
from deploy.supervisor import Supervisor


class ProcessLauncher:
    """A launcher whose components are children of this process. See :class:`deploy.launcher.Launcher`."""

    def __init__(self, *, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self._supervisors: dict[str, Supervisor] = {}
        self._queue: asyncio.Queue[ComponentEvent | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, spec: ComponentSpec) -> None:
        if spec.name in self._supervisors:
            raise LaunchError(f"component {spec.name!r} runs already")
        supervisor = Supervisor(spec, log_dir=self._log_dir, emit=self._emit)
        self._supervisors[spec.name] = supervisor
        supervisor.start()

    async def stop(self, name: str) -> None:
        supervisor = self._supervisors.pop(name, None)
        if supervisor is not None:
            supervisor.stop()
            await asyncio.to_thread(supervisor.join)

    async def restart(self, name: str) -> None:
        supervisor = self._supervisors.get(name)
        if supervisor is None:
            raise LaunchError(f"no component is named {name!r}")
        if supervisor.join(0):  # it had failed: begin anew
            del self._supervisors[name]
            await self.start(supervisor.spec)
        else:
            supervisor.restart()

    async def close(self) -> None:
        for supervisor in self._supervisors.values():
            supervisor.stop()
        for supervisor in list(self._supervisors.values()):
            await asyncio.to_thread(supervisor.join)
        self._supervisors.clear()
        self._queue.put_nowait(None)

    def kill(self) -> None:
        for supervisor in self._supervisors.values():
            supervisor.kill()

    async def events(self) -> AsyncIterator[ComponentEvent]:
        while (event := await self._queue.get()) is not None:
            yield event

    def _emit(self, event: ComponentEvent) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
