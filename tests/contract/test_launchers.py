"""What every launcher owes: one suite, run on plain processes and on an embedded Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from deploy.launcher import (
    ComponentEvent,
    ComponentKind,
    ComponentResources,
    ComponentSpec,
    ComponentState,
    Launcher,
    LaunchError,
    RestartPolicy,
)
from deploy.process import ProcessLauncher
from deploy.ray_launcher import RayLauncher

COMPONENT = str(Path(__file__).parents[1] / "support" / "component.py")
RESTART = RestartPolicy(initial_s=0.01, max_s=0.02)
pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


def spec(name: str, behaviour: str = "steady", **changes: object) -> ComponentSpec:
    facts = {"kind": ComponentKind.WORKER, "restart": RESTART, "grace_s": 0.5} | changes
    return ComponentSpec(name=name, argv=(sys.executable, "-S", COMPONENT, behaviour), **facts)  # type: ignore[arg-type]


def is_gone(process: psutil.Process) -> bool:
    """Ended; an orphan may wait for init to take note of it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Watched:
    """A launcher with its events kept, so that a test can wait for one."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.seen: list[ComponentEvent] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for event in self.launcher.events():
            async with self._changed:
                self.seen.append(event)
                self._changed.notify_all()

    async def event(self, name: str, state: ComponentState, count: int = 1) -> ComponentEvent:
        """The ``count``-th event of this kind, now or when it comes."""

        def found() -> list[ComponentEvent]:
            return [event for event in self.seen if event.component == name and event.state is state]

        async with self._changed, asyncio.timeout(20):
            await self._changed.wait_for(lambda: len(found()) >= count)
            return found()[count - 1]

    async def close(self) -> None:
        await self.launcher.close()
        await self._task


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-") as path:  # short: Ray puts sockets into it
        yield Path(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["process", "ray"])
async def watched(request: pytest.FixtureRequest, run_dir: Path) -> AsyncIterator[Watched]:
    launcher: Launcher
    launcher = ProcessLauncher(log_dir=run_dir) if request.param == "process" else RayLauncher(run_dir=run_dir)
    before = set(psutil.Process().children(recursive=True))
    async with launcher:
        watched = Watched(launcher)
        yield watched
        await watched.close()
    assert set(psutil.Process().children(recursive=True)) <= before, "a launcher leaves no process"
    assert not (run_dir / "ray").exists()


async def test_a_started_component_reports_its_pid_and_addresses(watched: Watched) -> None:
    await watched.launcher.start(spec("started"))
    started = await watched.event("started", ComponentState.STARTED)
    ready = await watched.event("started", ComponentState.READY)
    assert psutil.pid_exists(started.pid)
    assert ready.addresses == {"http": f"127.0.0.1:{started.pid}"}
    await watched.launcher.stop("started")
    assert not psutil.pid_exists(started.pid)


async def test_a_crashed_component_comes_back_as_a_new_process(watched: Watched) -> None:
    await watched.launcher.start(spec("crashed"))
    first = await watched.event("crashed", ComponentState.READY)
    os.kill(first.pid, signal.SIGKILL)
    exited = await watched.event("crashed", ComponentState.EXITED)
    second = await watched.event("crashed", ComponentState.READY, count=2)
    assert exited.exit_code == 137
    assert second.pid != first.pid
    await watched.launcher.stop("crashed")


async def test_a_restart_on_demand_replaces_the_process(watched: Watched) -> None:
    await watched.launcher.start(spec("renewed"))
    first = await watched.event("renewed", ComponentState.READY)
    await watched.launcher.restart("renewed")
    second = await watched.event("renewed", ComponentState.READY, count=2)
    assert second.pid != first.pid
    assert not psutil.pid_exists(first.pid)
    await watched.launcher.stop("renewed")


async def test_a_component_that_leaves_stays_away_and_its_name_is_free_again(watched: Watched) -> None:
    leaver = spec("leaver", "leaving", restart=RestartPolicy(initial_s=0.01, may_leave=True))
    await watched.launcher.start(leaver)
    await watched.event("leaver", ComponentState.READY)
    await watched.event("leaver", ComponentState.STOPPED)
    await watched.launcher.stop("leaver")
    await watched.launcher.start(leaver)
    await watched.event("leaver", ComponentState.STOPPED, count=2)
    states = {event.state for event in watched.seen if event.component == "leaver"}
    assert states == {ComponentState.STARTED, ComponentState.READY, ComponentState.STOPPED}
    await watched.launcher.stop("leaver")


async def test_a_configuration_error_is_final_and_says_what_to_change(watched: Watched) -> None:
    await watched.launcher.start(spec("misconfigured", "misconfigured"))
    failed = await watched.event("misconfigured", ComponentState.FAILED)
    assert failed.exit_code == 2
    assert failed.message == "the model file has no tensors; name another"
    await watched.launcher.stop("misconfigured")


async def test_a_component_that_never_becomes_ready_is_given_up(watched: Watched) -> None:
    await watched.launcher.start(spec("sickly", "sickly"))
    failed = await watched.event("sickly", ComponentState.FAILED)
    exits = [event for event in watched.seen if event.component == "sickly" and event.state is ComponentState.EXITED]
    assert len(exits) == RESTART.max_early_failures
    assert failed.tail == ("something went wrong",)
    await watched.launcher.stop("sickly")


async def test_a_stop_takes_the_children_of_the_component_too(watched: Watched) -> None:
    await watched.launcher.start(spec("parent", "parent"))
    ready = await watched.event("parent", ComponentState.READY)
    (child,) = psutil.Process(ready.pid).children()
    await watched.launcher.stop("parent")
    psutil.wait_procs([child], timeout=2)  # the signal was sent before stop returned; dying takes a moment
    assert is_gone(child)


async def test_a_component_that_ignores_sigterm_is_killed_after_its_grace(watched: Watched) -> None:
    await watched.launcher.start(spec("stubborn", "stubborn"))
    ready = await watched.event("stubborn", ComponentState.READY)
    await watched.launcher.stop("stubborn")
    assert not psutil.pid_exists(ready.pid)


async def test_a_stop_during_start_is_obeyed(watched: Watched) -> None:
    await watched.launcher.start(spec("stopped-early", "mute"))
    await watched.launcher.stop("stopped-early")
    await watched.event("stopped-early", ComponentState.STOPPED)
    started = [event for event in watched.seen if event.component == "stopped-early" and event.pid]
    assert not any(psutil.pid_exists(event.pid) for event in started)


async def test_a_name_is_used_once_at_a_time_and_free_after_a_stop(watched: Watched) -> None:
    await watched.launcher.start(spec("reused"))
    await watched.event("reused", ComponentState.READY)
    with pytest.raises(LaunchError, match="runs already"):
        await watched.launcher.start(spec("reused"))
    await watched.launcher.stop("reused")
    await watched.launcher.start(spec("reused"))
    await watched.event("reused", ComponentState.READY, count=2)
    await watched.launcher.stop("reused")


async def test_stopping_an_unknown_component_is_no_error(watched: Watched) -> None:
    await watched.launcher.stop("nobody")


async def test_demands_beyond_the_machine_are_refused_with_the_numbers(watched: Watched) -> None:
    if isinstance(watched.launcher, ProcessLauncher):
        return  # plain processes have no accounting: the kernel shares what is there
    await watched.launcher.start(spec("greedy", resources=ComponentResources(num_cpus=1000)))
    failed = await watched.event("greedy", ComponentState.FAILED)
    assert "greedy asks for 1000 CPUs" in failed.message
    assert "num_cpus" in failed.message
    await watched.launcher.stop("greedy")


async def test_kill_waits_for_nobodys_grace(watched: Watched) -> None:
    """The last test of the suite: the launcher is of no use after it."""
    await watched.launcher.start(spec("doomed", "stubborn", grace_s=60))
    ready = await watched.event("doomed", ComponentState.READY)
    process = psutil.Process(ready.pid)
    watched.launcher.kill()
    async with asyncio.timeout(10):
        await watched.launcher.close()
    assert is_gone(process)
