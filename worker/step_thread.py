"""The one thread that owns the engine: it runs steps, and between steps whatever others ask of the engine.

Others never touch scheduler, sequences or model; they :meth:`~StepThread.submit` a command. The block pool alone is
safe from any thread. One of the three places that may catch ``Exception`` (design.md 6): a step that fails is the end
of the process, because the state of the device is unknown; the supervisor starts a new incarnation.

A result is handed over, not worked on: text, outboxes and messages are the event loop's, and the next step starts at
once. Choosing and laying out a step is not done beside the step before it: on CPU that is 1 % of a step
(docs/adr/0011-steps-follow-each-other-on-cpu.md).
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from core.errors import WorkerLost
from core.failpoints import Failpoints
from engine.engine import Engine, StepResult

log = logging.getLogger(__name__)
T = TypeVar("T")

_STARVED_S = 0.005
"""Pause after a step that could run nothing: what its sequences wait for (blocks under transfer, promised to others)
comes back on other threads, without a word to this one."""


class StepThread:
    """``on_step`` (result, start and end by ``time.monotonic``; not of steps that did nothing) and ``on_death`` are
    called on this thread; they must only hand the result on."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepResult, float, float], None],
        on_death: Callable[[Exception], None],
        failpoints: Failpoints,
        core: int | None = None,
    ) -> None:
        """``core`` pins this thread (alone) to one CPU core: a worker's compute then never migrates."""
        self._core = core
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._failpoints = failpoints
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="baton-steps", daemon=True)
        self.busy_s = 0.0
        """Seconds spent in steps."""
        self._step_started_at: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Finish the running step, then end. Commands that were not run fail. False when the step hangs."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run ``command(engine)`` between two steps. Its exception is the future's, and harms nobody else; WorkerLost
        when the thread has ended."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping or self._dead is not None:
                future.set_exception(_ended())
                return future
            self._commands.append((command, future))
            self._wake.notify()
        return future

    async def call(self, command: Callable[[Engine], T]) -> T:
        """:meth:`submit`, awaited. The command runs even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(command)))

    def step_age_s(self) -> float:
        """How long the running step has been running; 0 between steps. A hung device is seen by it."""
        started_at = self._step_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._dead is None

    def _run(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
        try:
            while self._turn():
                pass
        except Exception as error:
            self._dead = error
            log.critical("the step thread died", exc_info=error)
            self._on_death(error)
        finally:
            with self._wake:
                self._stopping = True
                commands = list(self._commands)
                self._commands.clear()
            for _, future in commands:
                if future.set_running_or_notify_cancel():
                    future.set_exception(_ended())

    def _turn(self) -> bool:
        """Commands, then one step. False when the thread is to end."""
        with self._wake:
            while not (self._stopping or self._commands or self._engine.has_work):
                self._wake.wait()
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command, future in commands:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command(self._engine))
            except Exception as error:
                future.set_exception(error)
        if self._engine.has_work:
            self._failpoints.hit("worker.step")
            self._step_started_at = started = time.monotonic()
            result = self._engine.step()
            ended = time.monotonic()
            self.busy_s += ended - started
            self._step_started_at = None
            self._failpoints.hit("worker.stepped")
            if result.outputs or result.num_tokens or result.num_preempted:
                self._on_step(result, started, ended)
            else:
                self._wait_starved()
        return True

    def _wait_starved(self) -> None:
        with self._wake:
            if not (self._stopping or self._commands):
                self._wake.wait(_STARVED_S)


def _ended() -> WorkerLost:
    return WorkerLost("the engine of this worker has stopped")
