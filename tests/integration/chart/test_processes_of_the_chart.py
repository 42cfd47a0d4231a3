"""What the chart's containers run, run here: the same commands, environment, configuration and secrets, with addresses
and paths of this machine. Workers that nobody of ours launched join, and the chart's own test streams through them."""

from __future__ import annotations

import base64
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cluster import FREE_PORTS
from tests.support.chart import NAMESPACE, RELEASE, Object, containers, find, pods, render

FULL = f"{RELEASE}-baton"
START_S = 300.0
STOP_S = 60.0
FIELDS = {"metadata.name": "pod-{}", "spec.nodeName": "12345"}
"""A name of a node may look like a number."""


def free_ports(count: int) -> list[int]:
    """Below the ephemeral ones, so that no outgoing connection takes one before its server does."""
    found: list[int] = []
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


class Cell:
    """The containers of a rendered chart as processes."""

    def __init__(self, objects: tuple[Object, ...], folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self.api, self._grpc = free_ports(2)
        self._secrets()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._probes: dict[str, int] = {}

    def _secrets(self) -> None:
        data = find(self._objects, "Secret", "-auth")["data"]
        (self._folder / "auth").mkdir()
        for name, value in data.items():
            (self._folder / "auth" / name).write_bytes(base64.b64decode(value))

    def start(self, component: str) -> None:
        [template] = [
            one
            for _, one in pods(self._objects)
            if one["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        [container] = containers(template)
        self._probes[component], worker_port = free_ports(2)
        config = self._config(component, worker_port)
        home = self._folder / component
        with (home / "log").open("wb") as log:
            self._processes[component] = subprocess.Popen(
                self._command(container["command"], config, component),
                env=self._environment(container["env"], component, home),
                stdout=log,
                stderr=log,
            )

    def _config(self, component: str, worker_port: int) -> Path:
        text = find(self._objects, "ConfigMap", FULL)["data"]["cluster.yaml"]
        config: dict[str, Any] = yaml.safe_load(text)
        (home := self._folder / component).mkdir()
        probes = f"127.0.0.1:{self._probes[component]}"
        config["gateway"] |= {"listen": f"127.0.0.1:{self.api}", "http_listen": probes}
        config["router"] |= {"listen": f"127.0.0.1:{self._grpc}", "http_listen": probes}
        assert config["router"]["advertise"] == f"{FULL}-router.{NAMESPACE}.svc:7000"
        config["router"]["advertise"] = f"127.0.0.1:{self._grpc}"
        config["worker"] |= {"port": worker_port, "http_port": self._probes[component]}
        path = home / "cluster.yaml"
        path.write_text(self._mapped(yaml.safe_dump(config), home))
        return path

    def _mapped(self, text: str, home: Path) -> str:
        return text.replace("/etc/baton-auth", str(self._folder / "auth")).replace("/var/lib/baton", str(home))

    def _command(self, command: list[str], config: Path, component: str) -> list[str]:
        words = [word.replace("$(POD_NAME)", FIELDS["metadata.name"].format(component)) for word in command]
        assert words[0] == "baton"
        mapped = [word.replace("/etc/baton/cluster.yaml", str(config)) for word in words[1:]]
        return [sys.executable, "-m", "baton.cli", *mapped]

    def _environment(self, given: list[Mapping[str, Any]], component: str, home: Path) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in given:
            value = one.get("value")
            if value is None:
                value = FIELDS[one["valueFrom"]["fieldRef"]["fieldPath"]].format(component)
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[one["name"]] = self._mapped(value, home)
        outside = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return {**outside, **found, "TMPDIR": str(home), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}

    def wait_ready(self, component: str, ends_at: float) -> None:
        """By the probe that the chart names."""
        while True:
            process = self._processes[component]
            assert process.poll() is None, self.log(component)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._probes[component]}/ready", timeout=5):
                    return
            except OSError:
                assert time.monotonic() < ends_at, self.log(component)
                time.sleep(0.2)

    def log(self, component: str) -> str:
        return (self._folder / component / "log").read_text(errors="replace")[-4000:]

    def ask(self) -> subprocess.CompletedProcess[str]:
        """What the pod of `helm test` runs."""
        pod = find(self._objects, "Pod", "-test")
        [container] = containers({"spec": pod["spec"]})
        command = [word.replace("/etc/baton-auth", str(self._folder / "auth")) for word in container["command"][1:]]
        url = command.index("--url") + 1
        assert command[url] == f"http://{FULL}-gateway.{NAMESPACE}.svc:80"
        command[url] = f"http://127.0.0.1:{self.api}"
        argv = [sys.executable, "-m", "baton.cli", *command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)

    def stop(self, component: str) -> int:
        self._processes[component].send_signal(signal.SIGTERM)
        return self._processes[component].wait(STOP_S)

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    settings = ('router.mode="split"', "models[0].pools.decode.replicas=1")
    cell = Cell(render("values-kind.yaml", *settings), tmp_path)
    yield cell
    cell.close()


@pytest.mark.processes
@pytest.mark.timeout(500)
def test_workers_that_kubernetes_places_join_and_serve(cell: Cell) -> None:
    components = ("decode", "prefill", "gateway", "router")  # in no order that would help
    for component in components:
        cell.start(component)
    ends_at = time.monotonic() + START_S
    for component in components:
        cell.wait_ready(component, ends_at)
    done = cell.ask()
    assert done.returncode == 0, done.stderr + cell.log("gateway")
    assert "Paris" in done.stdout
    for component in ("prefill", "decode", "gateway", "router"):
        assert cell.stop(component) == 0, cell.log(component)
