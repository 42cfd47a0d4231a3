"""The actor that runs one component on the node where Ray put it."""

import queue
from pathlib import Path

from deploy.launcher import ComponentEvent, ComponentSpec
from deploy.supervisor import Supervisor

EVENT_POLL_S = 10.0


class SupervisorActor:
    """The same supervisor as the process launcher's. When Ray restarts it, the driver says again what to run."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ComponentEvent] = queue.SimpleQueue()
        self._supervisor: Supervisor | None = None

    def supervise(self, spec: str, log_dir: str | None) -> None:
        path = None if log_dir is None else Path(log_dir)
        self._supervisor = Supervisor(ComponentSpec.from_json(spec), log_dir=path, emit=self._events.put)
        self._supervisor.start()

    def next_events(self) -> list[str]:
        """What happened since the last call; waits a while for something to happen."""
        try:
            events = [self._events.get(timeout=EVENT_POLL_S)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return [event.to_json() for event in events]

    def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()

    def restart(self) -> None:
        if self._supervisor is not None:
            self._supervisor.restart()
