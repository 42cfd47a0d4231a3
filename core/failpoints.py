"""Named failpoints: tests reach a state by its name and not by sleeping.

Code calls ``failpoints.hit("decode.fetched")`` (or ``await failpoints.reach(...)`` on an event loop) at each
transition. With no actions configured a hit is one dict lookup. Actions (config ``failpoints: {NAME: ACTION}``):

``error:SLUG``   raise that ServingError        ``kill``       SIGKILL this process
``pause:S``      wait S seconds or until disarmed  ``once:ACTION`` only the first time
``after:N:ACTION``     from hit N+1 on
``when:PATH:ACTION``   only if the file PATH exists, which is removed: armed from outside, over restarts
``hold:PATH``          write who is here into the file PATH, and wait while it exists: let go from outside
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError, error_from_slug

_POLL_S = 0.005
_HOLD_S = 3600.0


class Failpoints:
    """The failpoints of one process (or of one worker, when several share a process in tests)."""

    def __init__(self, actions: Mapping[str, str] | None = None) -> None:
        self._actions = dict(actions or {})
        self._hits: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, name: str, action: str) -> None:
        """Arm (or with an empty action disarm) a failpoint at run time."""
        with self._lock:
            if action:
                self._actions[name] = action
            else:
                self._actions.pop(name, None)

    def num_hits(self, name: str) -> int:
        """How often an armed failpoint was reached."""
        with self._lock:
            return self._hits.get(name, 0)

    def hit(self, name: str, who: str = "") -> None:
        """For threads: may raise, sleep or kill. ``who`` is what is held here, such as a request id."""
        seconds, path = self._fire(name, who)
        until = time.monotonic() + seconds
        while (left := self._left_s(name, until, path)) > 0:
            time.sleep(min(_POLL_S, left))

    async def reach(self, name: str, who: str = "") -> None:
        """For coroutines: the same without blocking the loop."""
        seconds, path = self._fire(name, who)
        until = time.monotonic() + seconds
        while self._left_s(name, until, path) > 0:
            await asyncio.sleep(_POLL_S)

    def _left_s(self, name: str, until: float, path: str) -> float:
        if name not in self._actions or (path and not os.path.exists(path)):
            return 0.0
        return until - time.monotonic()

    def _fire(self, name: str, who: str) -> tuple[float, str]:
        """How long to wait, and the file whose end ends it before (empty: none)."""
        if name not in self._actions:
            return 0.0, ""
        with self._lock:
            action = self._actions.get(name, "")
            count = self._hits[name] = self._hits.get(name, 0) + 1
        return self._perform(name, action, count, who)

    def _perform(self, name: str, action: str, count: int, who: str) -> tuple[float, str]:
        kind, _, argument = action.partition(":")
        if kind == "once":
            return self._perform(name, argument, count, who) if count == 1 else (0.0, "")
        if kind == "after":
            after, _, rest = argument.partition(":")
            return self._perform(name, rest, count, who) if count > int(after) else (0.0, "")
        if kind == "when":
            path, _, rest = argument.partition(":")
            try:
                os.unlink(path)  # atomic: of several processes one acts
            except FileNotFoundError:
                return 0.0, ""
            return self._perform(name, rest, count, who)
        if kind == "pause":
            return float(argument), ""
        if kind == "hold":
            Path(argument).write_text(f"{name} {who}\n")
            return _HOLD_S, argument
        if kind == "error":
            raise error_from_slug(argument, f"failpoint {name}")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind:
            raise ConfigError(f"failpoint {name}: unknown action {action!r}")
        return 0.0, ""
