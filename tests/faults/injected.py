"""What every fault is: it waits for the event that it was drawn for, strikes once, and remembers whom it hit.

It acts through the hooks of the virtual cluster only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.virtual.network import Pipe
from kvtransfer.backends.base import Batch
from kvtransfer.backends.inproc import Fault
from tests.support.virtual.worker import VirtualWorker

if TYPE_CHECKING:
    from tests.faults.case import Case


_SHARE_OF_HANDSHAKES = 1 / 8


class Injected:
    """One fault. ``handoff`` is the hand-off it hit, if it hit one."""

    first_hits = 2
    """It strikes at one of the first so many chances."""

    def __init__(self, kind: str, case: Case, rng: random.Random) -> None:
        self.kind, self.case, self.rng = kind, case, rng
        self.number = len(case.faults)
        self.countdown = rng.randrange(self.first_hits)
        self.has_struck = False
        self.took_effect = False
        self.handoff: str | None = None

    def _is_due(self) -> bool:
        """Call at each chance."""
        if self.has_struck:
            return False
        self.countdown -= 1
        if self.countdown >= 0:
            return False
        self.has_struck = self.took_effect = True
        return True

    def _counts(self, handoff: str) -> bool:
        """Whether an operation is a chance: a handshake is many of them, and would draw most of the faults."""
        return bool(handoff) or self.rng.random() < _SHARE_OF_HANDSHAKES

    def begin(self) -> None:
        pass

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        return None

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        return None

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        pass

    def _soon(self, act: Callable[[], Any]) -> None:
        """From outside of every process."""
        self.case.cluster.loop.call_later(self.rng.choice((0.0, 0.0005, 0.002)), act, context=self.case.context.copy())


class AtAnyEvent(Injected):
    """Strikes at an event of the hand-off, whatever it is: a message, an operation or a failpoint."""

    first_hits = 24

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if pipe.name.startswith("handoff"):
            self._chance()
        return None

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if self._counts(handoff):
            self._chance()
        return None

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        self._chance()

    def _chance(self) -> None:
        if self._is_due():
            self._soon(self.strike)

    def strike(self) -> None:
        raise NotImplementedError
