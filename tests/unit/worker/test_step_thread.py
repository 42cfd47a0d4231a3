"""The step thread under a scripted engine: commands, starvation, and what is left for those who come too late."""

import threading
import time
from collections.abc import Callable

import pytest

from core.errors import WorkerLost
from core.failpoints import Failpoints
from engine.engine import StepResult
from worker.step_thread import StepThread

PATIENCE_S = 10.0


class ScriptedEngine:
    """Always has work; a step does what ``on_step`` says."""

    has_work = True

    def __init__(self, on_step: Callable[[], StepResult]) -> None:
        self.step = on_step


def make(on_step: Callable[[], StepResult]) -> tuple[StepThread, list[StepResult], threading.Event]:
    results: list[StepResult] = []
    died = threading.Event()
    thread = StepThread(
        ScriptedEngine(on_step),  # type: ignore[arg-type]
        on_step=lambda result, started_at, ended_at: results.append(result),
        on_death=lambda error: died.set(),
        failpoints=Failpoints(),
    )
    thread.start()
    return thread, results, died


def test_an_engine_that_can_run_nothing_is_asked_again_without_spinning_and_nobody_is_told() -> None:
    times: list[float] = []
    enough = threading.Event()

    def step() -> StepResult:
        times.append(time.monotonic())
        if len(times) == 5:
            enough.set()
        return StepResult()

    thread, results, _ = make(step)
    assert enough.wait(PATIENCE_S)
    assert thread.submit(lambda engine: "run").result(PATIENCE_S) == "run"
    assert thread.stop()
    assert results == []
    assert times[4] - times[0] >= 0.015


def test_commands_after_the_death_of_the_thread_fail_with_a_typed_error() -> None:
    def step() -> StepResult:
        raise RuntimeError("the device is lost")

    thread, _, died = make(step)
    assert died.wait(PATIENCE_S)
    with pytest.raises(WorkerLost):
        thread.submit(lambda engine: None).result(PATIENCE_S)
    assert not thread.is_alive
    thread.stop()
