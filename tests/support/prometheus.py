"""A real Prometheus and a real Alertmanager (Debian's packages) beside a cluster of a test, with our own rules."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
import yaml

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
RULES = OBSERVABILITY / "prometheus" / "rules.yaml"
START_S = 30.0


def program(name: str) -> str:
    """Skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus prometheus-alertmanager)")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Webhook:
    """What Alertmanager sends alerts to: takes them all."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        assert length is not None
        self.alerts += json.loads(await reader.readexactly(int(length[1])))["alerts"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    def names(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.alerts if alert["status"] == "firing"}


class Monitoring:
    """``async with``: Prometheus scrapes ``targets`` (addresses by job) each second; alerts go to ``webhook``.

    The rules are the product's, but that causes need not last: ``for`` is dropped.
    """

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]], webhook: Webhook) -> None:
        self._folder = folder
        self._targets = targets
        self._webhook = webhook
        self._processes: list[subprocess.Popen[bytes]] = []
        self.http = httpx.AsyncClient(timeout=30, trust_env=False)

    async def __aenter__(self) -> Self:
        names = (program("prometheus"), program("prometheus-alertmanager"))
        self._folder.mkdir()
        try:
            await self._start(*names)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self, prometheus: str, alertmanager: str) -> None:
        ports = free_port(), free_port()
        self._url = f"http://127.0.0.1:{ports[0]}"
        settings = yaml.safe_load((OBSERVABILITY / "prometheus" / "prometheus.yaml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{ports[1]}"]
        jobs = [job["job_name"] for job in settings["scrape_configs"]]
        assert set(jobs) == set(self._targets)
        settings["scrape_configs"] = [
            {"job_name": job, "static_configs": [{"targets": list(self._targets[job])}]} for job in jobs
        ]
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        (self._folder / "rules.yaml").write_text(re.sub(r"\n +for: \w+", "", RULES.read_text()))
        routes = yaml.safe_load((OBSERVABILITY / "alertmanager.yaml").read_text())
        routes["route"]["group_wait"] = "0s"
        for receiver in routes["receivers"]:
            receiver["webhook_configs"][0]["url"] = f"http://127.0.0.1:{self._webhook.port}/{receiver['name']}"
        (self._folder / "alertmanager.yaml").write_text(yaml.safe_dump(routes))
        self._run(
            alertmanager,
            f"--config.file={self._folder / 'alertmanager.yaml'}",
            f"--storage.path={self._folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{ports[1]}",
            "--cluster.listen-address=",
        )
        self._run(
            prometheus,
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{ports[0]}",
        )
        await self.until(lambda: "Prometheus is ready", self._is_ready)

    def _run(self, *command: str) -> None:
        with (self._folder / f"{Path(command[0]).name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def _stop(self) -> None:
        await self.http.aclose()
        for process in self._processes:
            process.kill()
            process.wait()

    async def _is_ready(self) -> bool:
        try:
            return (await self.http.get(f"{self._url}/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def until(self, what: Callable[[], str], is_true: Callable[[], Any], timeout_s: float = START_S) -> None:
        """Asks again until it is; ``is_true`` may be a coroutine function."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = is_true()
                    if await answer if asyncio.iscoroutine(answer) else answer:
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.log"))
            raise AssertionError(f"waited {timeout_s:g} s in vain until {what()}\n{logs}") from None

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector. Fails for what is no valid query."""
        answer = (await self.http.get(f"{self._url}/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    async def described(self) -> set[str]:
        """Families that some process has, with or without series."""
        answer = (await self.http.get(f"{self._url}/api/v1/targets/metadata")).json()
        return {one["metric"] for one in answer["data"]}
