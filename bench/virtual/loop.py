"""An event loop whose time is free, and processes that live on it: they can be stopped, continued and killed.

Nothing sleeps: when nothing is ready, time jumps to the next timer. When there is no timer either, whatever is still
awaited will never come, and the loop says so (:class:`NothingLeft`) instead of hanging.

Who a callback belongs to is in its context, which tasks, timers and futures hand on. A stopped process is one whose
callbacks are put aside, as SIGSTOP does; a killed one never runs again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from asyncio import base_events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")
_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)

WORK_S = 0.0005
"""What work that real loops give to a thread takes here."""


class NothingLeft(RuntimeError):
    """Somebody waits for what nothing will ever do."""


class Process:
    """A name for callbacks. Others reach it only by messages that are delivered in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stopped = False
        self.is_killed = False
        self.held: list[asyncio.Handle] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.cpu_s = 0.0
        """Of its callbacks, on a loop that meters them."""
        self.context: Context = copy_context()
        self.context.run(_PROCESS.set, self)

    def run(self, callback: Callable[..., Any], *args: Any) -> Any:
        """At once, as this process. Not from within its own context."""
        return self.context.copy().run(callback, *args)

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str = "") -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=f"{self.name}/{name}", context=self.context.copy())

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        """What was put aside is done now, in order."""
        self.is_stopped = False
        asyncio.get_running_loop()._ready.extend(self.held)  # type: ignore[attr-defined]
        self.held.clear()

    def kill(self) -> None:
        self.is_stopped = self.is_killed = True

    async def bury(self) -> None:
        """Let the tasks of a killed (or ended) process unwind where nobody sees it, so that none is left."""
        self.is_killed = True
        self.go_on()
        for _ in range(3):
            tasks = [task for task in self.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=60.0)
        assert not any(not task.done() for task in self.tasks), f"{self.name} has tasks that cannot be ended"


class VirtualLoop(base_events.BaseEventLoop):
    """Single-threaded: what would run on a thread runs on the loop, a moment later."""

    def __init__(self, *, is_metered: bool = False) -> None:
        """``is_metered``: CPU time is noted by process. It costs a microsecond for each callback."""
        super().__init__()
        self._is_metered = is_metered
        self._now = 0.0
        self.set_task_factory(_make_task)
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        return self._now

    now = time
    """So it is a :class:`core.clock.Clock` too."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """To its end, which is the loop's end too."""
        try:
            return self.run_until_complete(work)
        finally:
            self.close()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if not future.done():
                try:
                    future.set_result(func(*args))
                except BaseException as error:  # noqa: BLE001 - the future's, as on a thread
                    future.set_exception(error)

        self.call_later(WORK_S, run)
        return future

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and (timers[0]._cancelled or not ready or timers[0]._when <= self._now):
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                self._now = max(self._now, timer._when)
                ready.append(timer)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            raise NothingLeft(f"nothing is left to happen at {self._now:.3f} s")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is not None and process.is_stopped:
                process.held.append(handle)
            elif process is None or not self._is_metered:
                handle._run()
            else:
                began = time.thread_time()
                handle._run()
                process.cpu_s += time.thread_time() - began

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass


def current_process() -> Process | None:
    return _PROCESS.get()


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    context = options.get("context")
    process = _PROCESS.get() if context is None else context.get(_PROCESS)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task
