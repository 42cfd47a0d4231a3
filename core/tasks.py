"""Owned background tasks: every task has a parent that ends it, and a task that dies is never silent."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

log = logging.getLogger(__name__)


class TaskScope:
    """A set of tasks with one owner. ``close`` cancels and awaits them all; a failure is logged at once.

    ``on_failure`` (if given) is called with the exception of a task that ended by one, e.g. to stop the process.
    """

    def __init__(self, name: str, *, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"task scope {self._name} is closed")
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("background task failed", extra={"task": task.get_name()}, exc_info=error)
            if self._on_failure is not None:
                self._on_failure(error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def join(self, within_s: float) -> None:
        """Wait until every task of now has ended by itself: for those that are short and give something back."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


async def all_or_none(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all of them beside each other. The first error cancels the others, waits for them and is raised."""
    if len(works) == 1:
        return await works[0]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
