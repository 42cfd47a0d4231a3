"""A real PostgreSQL server for a test, where its programs are installed (Debian's package ``postgresql``)."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import pytest

USER, PASSWORD = "baton", "a password of the test"
START_S = 60


class PostgresServer:
    """On a free port of loopback, with one user who has a password."""

    def __init__(self) -> None:
        programs = _programs()
        if programs is None:
            pytest.skip("PostgreSQL's server is not installed")
        self._programs = programs
        # Not below pytest's folder: the server refuses to be root, and others may not look into that one.
        self._folder = Path(tempfile.mkdtemp(prefix="baton-postgres-"))
        self.password_file = self._folder / "password"
        self.password_file.write_text(PASSWORD)
        self._as: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self._folder}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            os.chown(self.password_file, account.pw_uid, account.pw_gid)
            self._as |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()

    def new_database(self) -> str:
        """The URL of an empty one."""
        name = f"baton_{next(self._numbers)}"
        at = ("-h", "127.0.0.1", "-p", str(self._port), "-U", USER)
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        subprocess.run([self._programs / "createdb", *at, name], check=True, env=environment)
        return f"postgresql://{USER}@127.0.0.1:{self._port}/{name}"

    def start(self) -> Self:
        data = str(self._folder / "data")
        login = (f"--username={USER}", f"--pwfile={self.password_file}", "--auth=scram-sha-256")
        subprocess.run([self._programs / "initdb", "-D", data, *login, "--no-sync"], check=True, **self._as)
        listen = ("-h", "127.0.0.1", "-p", str(self._port), "-k", str(self._folder), "-c", "fsync=off")
        self._process = subprocess.Popen([self._programs / "postgres", "-D", data, *listen], **self._as)
        ends_at = time.monotonic() + START_S
        ask = [self._programs / "pg_isready", "-h", "127.0.0.1", "-p", str(self._port)]
        while subprocess.run(ask, check=False, stdout=subprocess.DEVNULL).returncode != 0:
            assert self._process.poll() is None, "the server ended while starting"
            assert time.monotonic() < ends_at, f"the server did not answer within {START_S} s"
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Ends every connection and the server."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _programs() -> Path | None:
    on_path = shutil.which("postgres")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)
