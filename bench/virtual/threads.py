"""What a worker has threads for, on the virtual loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from bench.virtual.loop import WORK_S
from engine.engine import Engine, StepResult
from kvtransfer.transfer_thread import TransferThread

T = TypeVar("T")
_COMMAND_S = 0.0001
_STARVED_S = 0.005
"""As the step thread."""
_MIN_TURN_S = 0.0002


class TimedSteps:
    """:class:`worker.step_thread.StepThread` with timers in the place of the thread: a step is computed when it begins
    and its result is known when it has taken ``step_s`` of it. Commands wait for the end of the step."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepResult, float, float], None],
        step_s: Callable[[StepResult], float],
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._step_s = step_s
        self._commands: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = deque()
        self._is_stepping = False
        self._turn_at: asyncio.TimerHandle | None = None
        self.busy_s = 0.0

    async def call(self, command: Callable[[Engine], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.append((command, future))
        self._wake(_COMMAND_S)
        return await asyncio.shield(future)

    def _wake(self, after_s: float) -> None:
        if not self._is_stepping:
            if self._turn_at is not None:
                self._turn_at.cancel()
            self._turn_at = asyncio.get_running_loop().call_later(after_s, self._turn)

    def _turn(self) -> None:
        self._turn_at = None
        while self._commands:
            command, future = self._commands.popleft()
            try:
                future.set_result(command(self._engine))
            except Exception as error:  # noqa: BLE001 - the caller's, as on the step thread
                future.set_exception(error)
        if not self._engine.has_work:
            return
        result = self._engine.step()
        if not (result.outputs or result.num_tokens or result.num_preempted):
            self._wake(_STARVED_S)
            return
        loop = asyncio.get_running_loop()
        started, seconds = loop.time(), self._step_s(result)
        self._is_stepping = True
        loop.call_later(seconds, self._finish, result, started)

    def _finish(self, result: StepResult, started: float) -> None:
        ended = asyncio.get_running_loop().time()
        self._is_stepping = False
        self.busy_s += ended - started
        self._on_step(result, started, ended)
        self._turn()


class Later(Executor):
    """A thread's work, a moment later on the loop."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work(*args, **named))
            except BaseException as error:  # noqa: BLE001 - the future's, as on a thread
                future.set_exception(error)

        asyncio.get_running_loop().call_later(WORK_S, run)
        return future


class VirtualTransferThread(TransferThread):
    """The transfer thread with the loop in the place of the thread."""

    _timer: asyncio.TimerHandle | None = None
    _sleep_s = _MIN_TURN_S
    max_turn_s = 0.05
    """Between two looks at operations that are under way."""

    def _submit(self, command: Callable[[], None]) -> bool:
        accepted = super()._submit(command)
        if accepted:
            self._wake(_MIN_TURN_S)
        return accepted

    def _wake(self, sleep_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._sleep_s = sleep_s
        self._timer = asyncio.get_running_loop().call_later(sleep_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._take_commands(0.0)
        if self._loop.turn():
            self._wake(_MIN_TURN_S)
        elif not self._loop.is_idle or self._loop.stats().num_retired_links:
            self._wake(min(self._sleep_s * 2, self.max_turn_s))

    def end(self) -> bool:
        """As at the end of the thread."""
        if self._timer is not None:
            self._timer.cancel()
        self._end()
        return self._closed_clean
