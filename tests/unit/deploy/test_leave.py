"""The pre-stop of pods in which Ray runs workers: each of ours is told, and waited for; nobody else is touched."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from deploy.leave import leave

DRAINS = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(60)"
HANGS = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _process(started: list[subprocess.Popen[str]], code: str, *words: str) -> psutil.Process:
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return psutil.Process(process.pid)


def test_a_worker_is_told_and_waited_for(start: list[subprocess.Popen[str]]) -> None:
    worker = _process(start, DRAINS, "-m", "baton.process", "worker", "--role", "decode")
    other = _process(start, DRAINS, "-m", "baton.process", "router")
    assert leave([worker, other], timeout_s=30) == 0
    assert start[0].wait(10) == 0
    assert start[1].poll() is None, "not a worker"


def test_one_that_does_not_end_is_counted(start: list[subprocess.Popen[str]]) -> None:
    worker = _process(start, HANGS, "-m", "baton.process", "worker")
    assert leave([worker], timeout_s=0.5) == 1
