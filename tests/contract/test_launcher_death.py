"""Whatever becomes of the process that launched a cluster, nothing of the cluster outlives it for long."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


@pytest.fixture(params=["process", "ray"])
def parent(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that launches two components; a temporary directory beside it must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="baton-") as run_dir:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cluster_parent", request.param, run_dir],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
        assert not (Path(run_dir) / "ray").exists(), "the guard removes Ray's directory"


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.split()[1:]
    raise AssertionError(f"the parent ended before it said {word!r}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    alive = [p for p in psutil.wait_procs(processes, timeout=10)[1] if p.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_nothing_outlives_a_killed_launcher(parent: subprocess.Popen[str]) -> None:
    pids = {int(pid) for pid in read_until(parent, "up")}
    started = descendants(parent)
    assert pids <= {process.pid for process in started}
    parent.kill()
    assert_gone(started)


def test_nothing_outlives_a_launcher_killed_while_it_starts(parent: subprocess.Popen[str]) -> None:
    read_until(parent, "opening")
    while len(started := descendants(parent)) < 2:  # under Ray: the guard and its driver, which starts Ray
        time.sleep(0.01)
    parent.kill()
    assert_gone(started)
