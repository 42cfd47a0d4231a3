"""Ctrl-C, SIGTERM and SIGHUP of a command that runs until it is told to stop."""

import asyncio
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """From entering on, the first signal ends the run in good order and the next ones say: faster.

    Plain handlers and not the event loop's: they must hold before the loop runs and after it has ended. A signal that
    comes before there is a task to stop is kept for it. On leaving, the signals are ignored for good: the process is
    about to end, nothing is left to stop, and how it ends was decided. A SIGHUP that the caller had ignored (``nohup``)
    stays ignored.
    """

    def __init__(self) -> None:
        self.was_told_to_stop = False
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._hurry: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    async def attach(self, *, hurry: Callable[[], None]) -> None:
        """Tie the signals to the calling task: the first one cancels it, later ones call ``hurry``. Raises
        CancelledError here and now if a signal came before."""
        self._loop, self._task, self._hurry = asyncio.get_running_loop(), asyncio.current_task(), hurry
        if self.was_told_to_stop:
            self._stop()
            await asyncio.sleep(0)

    def begin_stop(self) -> None:
        """The run is ending for a reason of its own: from here on every signal means faster."""
        self._is_stopping = True

    def detach(self) -> None:
        """Everything has stopped: signals mean nothing any more. Belongs before the end of the task's loop."""
        self._loop = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Between any two instructions of this thread, which may hold a lock: only a note, and a call on the loop."""
        is_first = not (self.was_told_to_stop or self._is_stopping)
        self.was_told_to_stop = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop if is_first else self._hurry)

    def _stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
