"""``baton up`` as a person uses it: the command, its output, Ctrl-C, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PORTS = ("--set", "gateway.listen=127.0.0.1:0", "--set", "router.listen=127.0.0.1:0")
SMALL = ("--set", "models.0.kv.num_blocks=200")
STOP_S = 10.0
MODEL = "smollm2-135m-instruct"
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "temperature": 0,
}


SIGNAL_AT_EVERY_LINE = """
import atexit, builtins, functools, signal, sys
number, plain = int(sys.argv.pop(1)), builtins.print
def print_and_signal(*values, **options):
    plain(*values, **options)
    signal.raise_signal(number)
builtins.print = print_and_signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have ignored it
import baton.cli
atexit.register(functools.partial(signal.raise_signal, number))
sys.exit(baton.cli.main())
"""
"""``baton`` that gets a signal in the moment after each of its lines, and once more at the end of the interpreter."""


class Up:
    """A running ``baton up`` and what it has printed."""

    def __init__(self, *arguments: str, program: tuple[str, ...] = ("-m", "baton")) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "up", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said = ""
        self._children: set[psutil.Process] = set()

    def read_until(self, pattern: str) -> str:
        """The line that matches. Fails with everything that was said if the command ends before."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            self.said += line
            self._children |= set(psutil.Process(self.process.pid).children(recursive=True))
            if re.search(pattern, line):
                return line
        pytest.fail(f"baton up ended before {pattern!r}:\n{self.said}{self.process.stderr.read()}")

    def wait_until_up(self) -> str:
        """The URL of the API."""
        line = self.read_until("Baton is up")
        self.read_until("Ctrl-C stops everything")
        match = re.search(r"http://[\d.:]+", line)
        assert match is not None
        return match[0]

    def address(self, component: str) -> str:
        """The gRPC address of a component in the table."""
        match = re.search(rf"^{component} +\d+ +([\d.:]+)", self.said, re.MULTILINE)
        assert match is not None
        return match[1]

    def stop(self, number: signal.Signals) -> float:
        """Signal, wait for the end of the command and of all it started; returns the seconds it took."""
        self._children |= set(psutil.Process(self.process.pid).children(recursive=True))
        started = time.monotonic()
        self.process.send_signal(number)
        self.wait()
        return time.monotonic() - started

    def wait(self) -> None:
        """Wait for the end of the command, and of all that it was seen to have started."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()  # `communicate` would miss what is in the file's buffer already
        self.process.communicate(timeout=3 * STOP_S)
        _, alive = psutil.wait_procs(self._children, timeout=STOP_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@contextmanager
def up(*arguments: str, program: tuple[str, ...] = ("-m", "baton")) -> Iterator[Up]:
    command = Up(*arguments, program=program)
    try:
        yield command
    finally:
        command.kill()


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def only_error(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error."""
    (line,) = result.stderr.splitlines()
    assert line.startswith("baton: error: ")
    return line


def problem_of(router: str, role: str) -> str:
    status = json.loads(baton("status", "--json", "--router", router).stdout)
    return next(str(pool["problem"]) for pool in status["pools"] if pool["role"] == role)


@pytest.mark.timeout(240)
def test_a_newcomers_cluster_under_ray_answers_and_stops_and_starts_again() -> None:
    more_than_half = (os.cpu_count() or 1) // 2 + 1
    settings = (
        *("--set", "router.mode=split"),  # whatever this machine's costs say
        *("--set", "models.0.pools.prefill.resources.num_cpus=0"),
        *("--set", f"models.0.pools.decode.resources.num_cpus={more_than_half}"),
    )
    with up(*PORTS, *SMALL, *settings) as command:
        url = command.wait_until_up()
        answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=100)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]

        router = command.address("router")
        status = json.loads(baton("status", "--json", "--router", router).stdout)
        workers = {worker["role"]: worker for worker in status["workers"]}
        assert workers["decode"]["kv_bytes_received"]["nixl"] > 0
        assert workers["decode"]["prompt_tokens_computed"] == 0
        assert len({worker["pid"] for worker in status["workers"]}) == 2
        assert "decode-0" in baton("status", "--router", router).stdout

        chat = baton("chat", "What is the capital of France?", "--max-tokens", "12", "--url", url)
        assert "Paris" in chat.stdout
        assert re.search(r"prefill +[\d.]+ ms", chat.stdout), chat.stdout
        assert "by nixl" in chat.stdout

        assert baton("scale", MODEL, "decode=2", "--router", router).stdout == f"{MODEL}: prefill=1, decode=2\n"
        until = time.monotonic() + 60
        while not (problem := problem_of(router, "decode")):
            assert time.monotonic() < until
        assert problem.startswith(f"decode-1 asks for {more_than_half} CPU")
        assert baton("scale", MODEL, "decode=1", "--wait", "--router", router).returncode == 0
        assert problem_of(router, "decode") == ""

        assert command.stop(signal.SIGTERM) < STOP_S
        assert command.process.returncode == 0

    gateway = url.removeprefix("http://")
    with up("--set", f"gateway.listen={gateway}", "--set", f"router.listen={router}", *SMALL) as command:
        assert command.wait_until_up() == url
        assert command.stop(signal.SIGINT) < STOP_S


@pytest.mark.parametrize("launcher", ["process", "ray"])
@pytest.mark.parametrize("moment", ["start", "router is ready"])
def test_ctrl_c_during_the_start_leaves_nothing(launcher: str, moment: str) -> None:
    if launcher == "process" and moment == "start":
        moment = "starting router"
    with up("--launcher", launcher, *PORTS, *SMALL) as command:
        command.read_until(moment)
        assert command.stop(signal.SIGINT) < STOP_S
        assert command.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("launcher", "first"), [("process", "starting router"), ("ray", "starting Ray")])
def test_a_signal_after_any_line_stops_everything_in_good_order(
    launcher: str, first: str, number: signal.Signals
) -> None:
    with up("--launcher", launcher, *PORTS, *SMALL, program=("-c", SIGNAL_AT_EVERY_LINE, str(int(number)))) as command:
        command.read_until(first)
        command.wait()
        assert command.process.returncode == 0
        assert command.said.endswith("stopped\n")


def test_a_taken_port_is_one_line_that_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = baton("up", "--set", f"gateway.listen=127.0.0.1:{port}", "--set", "router.listen=127.0.0.1:0")
    assert result.returncode == 2
    assert f"gateway.listen: cannot listen on 127.0.0.1:{port}" in only_error(result)
    assert f"--set gateway.listen=127.0.0.1:{port + 1}" in result.stderr


def test_a_wrong_model_file_is_one_line_and_nothing_runs_on(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(4096))
    result = baton("up", "--launcher", "process", *PORTS, "--set", f"models.0.path={path}")
    assert result.returncode == 2
    assert str(path) in only_error(result)
    assert str(path) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_demands_that_do_not_fit_are_told_with_the_numbers() -> None:
    result = baton("up", *PORTS, "--set", "models.0.pools.decode.resources.num_cpus=1000")
    assert result.returncode != 0
    assert "decode-0 asks for 1000 CPUs, but this machine offers" in only_error(result)


def test_status_and_chat_without_a_cluster_say_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = f"127.0.0.1:{probe.getsockname()[1]}"
    assert "baton up" in only_error(baton("status", "--router", free))
    assert "baton up" in only_error(baton("chat", "hello", "--url", f"http://{free}"))


def test_a_ray_address_where_nobody_answers_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = f"127.0.0.1:{probe.getsockname()[1]}"
    result = baton("up", *PORTS, "--set", f"launcher.ray.address={free}")
    assert result.returncode != 0
    assert f"no Ray cluster answers at '{free}'" in only_error(result)
