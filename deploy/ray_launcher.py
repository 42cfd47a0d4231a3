"""Components placed and supervised by Ray: on an embedded Ray of this machine, or on a running cluster.

The launcher only speaks to its driver process (:mod:`deploy.ray_driver`), which runs under a guard
(:mod:`deploy.guard`) that leaves nothing behind, whenever and however this process ends.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from core.config import child_environment
from deploy.launcher import ComponentEvent, ComponentSpec, ComponentState, LaunchError

MAX_LINE_BYTES = 4 << 20
CONNECT_S = 5.0
SWEEP_S = 4.0
"""What the guard needs after the driver's end."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_prestart_worker_first_driver": "0",  # no idle workers: our actors are all there is
    "RAY_memory_monitor_refresh_ms": "0",  # it would shoot a supervisor when the machine's memory is nearly full
    "RAY_DEDUP_LOGS": "0",
}


class RayLauncher:
    """A launcher over Ray. See :class:`deploy.launcher.Launcher`. ``run_dir`` is a short path: it will hold sockets."""

    def __init__(
        self, *, run_dir: Path, log_dir: Path | None = None, address: str = "local", stop_s: float = 8
    ) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._address = address
        self._stop_s = stop_s
        self._guard: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[ComponentEvent | None] = asyncio.Queue()
        self._ended: dict[str, asyncio.Event] = {}
        self._is_closing = False

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await asyncio.shield(self.close())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self) -> None:
        if self._address not in ("local", "auto"):
            await _check_reachable(self._address)
        ours, theirs = socket.socketpair()
        with theirs, self._open_log() as output:
            environment = dict(RAY_ENVIRONMENT)
            if self._address == "local":
                # Ray asks for a token and would write one into the home directory; an own one dies with this cluster.
                environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            temp_dir = self._run_dir / "ray"
            log = None if self._log_dir is None else str(self._log_dir)
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "deploy.guard", "--parent", str(os.getpid()), "--grace", str(self._stop_s)),
                *("--remove", str(temp_dir), "--keep-fd", str(theirs.fileno()), "--"),
                *(sys.executable, "-m", "deploy.ray_driver", "--fd", str(theirs.fileno())),
                *("--address", self._address, "--temp-dir", str(temp_dir)),
                *(() if log is None else ("--log-dir", log)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=child_environment(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        line = await reader.readline()
        if not line:
            raise LaunchError("Ray's driver ended while starting; is 'ray' installed (pip install 'baton-serve[ray]')?")
        greeting = json.loads(line)
        if "refused" in greeting:
            raise LaunchError(greeting["refused"])
        self._reading = asyncio.create_task(self._read(reader), name="ray-launcher/events")

    def _open_log(self) -> IO[bytes]:
        path = Path(os.devnull) if self._log_dir is None else self._log_dir / "ray.log"
        return path.open("ab")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):  # a driver that was killed: the same as its end
            while line := await reader.readline():
                event = ComponentEvent.from_json(json.loads(line)["event"])
                if event.state in (ComponentState.STOPPED, ComponentState.FAILED):
                    self._ended[event.component].set()
                self._queue.put_nowait(event)
        # The driver is gone, every component with it. After close this is expected; else each is reported.
        for name, ended in self._ended.items():
            if not ended.is_set():
                ended.set()
                state = ComponentState.STOPPED if self._is_closing else ComponentState.FAILED
                self._queue.put_nowait(ComponentEvent(component=name, state=state, message="Ray's driver ended"))

    async def start(self, spec: ComponentSpec) -> None:
        if spec.name in self._ended:
            raise LaunchError(f"component {spec.name!r} runs already")
        self._ended[spec.name] = asyncio.Event()
        await self._order("start", spec=spec.to_json())

    async def stop(self, name: str) -> None:
        ended = self._ended.get(name)
        if ended is not None:
            await self._order("stop", name=name)
            await ended.wait()
            del self._ended[name]

    async def restart(self, name: str) -> None:
        if name not in self._ended:
            raise LaunchError(f"no component is named {name!r}")
        await self._order("restart", name=name)

    async def close(self) -> None:
        self._is_closing = True
        guard = self._guard
        if guard is not None and guard.returncode is None:
            guard.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._stop_s + SWEEP_S):
                    await guard.wait()
            except TimeoutError:
                self.kill()
                await guard.wait()
        if self._reading is not None:
            await self._reading
        if self._writer is not None:
            self._writer.close()
        self._queue.put_nowait(None)

    def kill(self) -> None:
        """The driver goes at once; the guard, told by its end, kills the rest."""
        if self._guard is not None and self._guard.returncode is None:
            self._guard.send_signal(signal.SIGQUIT)

    async def events(self) -> AsyncIterator[ComponentEvent]:
        while (event := await self._queue.get()) is not None:
            yield event

    async def _order(self, order: str, **fields: str) -> None:
        assert self._writer is not None, "use the launcher as an async context"
        try:
            self._writer.write(json.dumps({"order": order, **fields}).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            raise LaunchError("Ray's driver has ended") from None


async def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises LaunchError when nobody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        if not host or not port.isdigit():
            raise ValueError(f"{address!r} is not HOST:PORT")
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"launcher.ray.address: no Ray cluster answers at {address!r} ({error or 'no answer'}); start one with "
            "`ray start --head`, or set it to 'local' for an embedded one"
        ) from None
    writer.close()
    await writer.wait_closed()
