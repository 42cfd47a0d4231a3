"""What it means to run the processes of a cluster: the words that every launcher shares.

A component (a router, a gateway, a worker) is one process, described by a :class:`ComponentSpec`. A launcher starts,
supervises, restarts and stops components and reports what happens as :class:`ComponentEvent`. Life of a component::

    start() -> [WAITING] -> STARTED -> READY -> EXITED -> RESTARTING -> STARTED ...
                                 \\-> EXITED -> FAILED        a configuration error, or it never became ready
    stop()  -> STOPPED                                       legal in every state; the process is gone
    it left -> STOPPED                                       with exit code 0, where the policy allows it

What a component owes its launcher:

- Once it serves, it prints one line on standard output: ``baton-ready`` and a JSON object of its addresses.
- If it cannot start, it prints one line ``baton: error: what to change`` on standard error and exits with
  ``EXIT_CONFIG`` when a restart cannot help, with any other code when it might.
- On SIGTERM it stops cleanly within the grace period of its spec.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from core.errors import ServingError

EXIT_CONFIG = 2
"""Exit code of a component that can never start as it is configured. Supervisors do not restart it."""
EXIT_FAILED = 1
"""Exit code of a component that failed for a reason that may pass."""

READY_PREFIX = "baton-ready "
ERROR_PREFIX = "baton: error: "


class LaunchError(ServingError):
    """A component or its launcher cannot run. ``message`` is one line that says what to change."""

    slug = "launch_error"
    grpc_status = "FAILED_PRECONDITION"


class ComponentKind(StrEnum):
    ROUTER = "router"
    GATEWAY = "gateway"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentResources:
    """What one component asks of the machine. Router and gateway ask for nothing: they share what is there."""

    num_cpus: float = 0
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    def as_bundle(self) -> dict[str, float]:
        """The non-zero demands, by Ray's names."""
        demands = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.custom}
        return {name: amount for name, amount in demands.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Exponential backoff between restarts; a run of ``healthy_s`` forgets the failures before it."""

    initial_s: float = 0.25
    max_s: float = 10
    healthy_s: float = 20
    max_early_failures: int = 3
    """Starts in a row that may end before the component was ever ready; then it is FAILED."""
    may_leave: bool = False
    """Exit code 0 is its good-bye: STOPPED, and not started again."""

    def delay_s(self, failures: int) -> float:
        """Pause before the restart that follows failure number ``failures`` (1, 2, ...) in a row."""
        return float(min(self.max_s, self.initial_s * 2 ** min(failures - 1, 32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """One process to run. ``name`` is unique in the cluster and, for a worker, its worker id."""

    name: str
    kind: ComponentKind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    resources: ComponentResources = ComponentResources()
    restart: RestartPolicy = RestartPolicy()
    grace_s: float = 5
    """Time between SIGTERM and SIGKILL."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        data["kind"] = ComponentKind(data["kind"])
        data["argv"] = tuple(data["argv"])
        data["resources"] = ComponentResources(**data["resources"])
        data["restart"] = RestartPolicy(**data["restart"])
        return cls(**data)


class ComponentState(StrEnum):
    WAITING = "waiting"
    """Not started: its resources are not free. ``message`` says which."""
    STARTED = "started"
    READY = "ready"
    EXITED = "exited"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    """Given up. ``message`` says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentEvent:
    """One change in the life of a component. Fields that a state does not have keep their defaults."""

    component: str
    state: ComponentState
    pid: int = 0
    exit_code: int = 0
    """As of the shell: 137 for a process ended by signal 9."""
    delay_s: float = 0
    """RESTARTING: the pause before the next start."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """READY: what the component serves, by protocol (``grpc``, ``http``)."""
    message: str = ""
    tail: tuple[str, ...] = ()
    """EXITED, FAILED: the last lines that the process wrote."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        data["state"] = ComponentState(data["state"])
        data["tail"] = tuple(data["tail"])
        return cls(**data)


class Launcher(Protocol):
    """Runs components. Used as an async context: leaving it stops everything that it started.

    ``events`` has one reader. ``kill`` is the last resort: nothing runs on after it, nothing is asked first.
    Raises LaunchError where the launcher itself cannot run.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def start(self, spec: ComponentSpec) -> None:
        """Begin to supervise ``spec``; what becomes of it arrives as events. A name can be used once at a time."""

    async def stop(self, name: str) -> None:
        """Stop one component, if it has not ended by itself, and forget it. Returns when its process is gone. An
        unknown name is no error."""

    async def restart(self, name: str) -> None:
        """Stop the process of a component and start it again at once (no failure is counted)."""

    async def close(self) -> None:
        """Stop all components, then the launcher itself. May be called at any moment, and again."""

    def kill(self) -> None:
        """End every process now, without grace."""

    def events(self) -> AsyncIterator[ComponentEvent]:
        """Everything that happens, in order for each component. Ends after ``close``."""


def ready_line(addresses: Mapping[str, str]) -> str:
    """The line by which a component says that it serves."""
    return READY_PREFIX + json.dumps(dict(addresses), separators=(",", ":"))


def parse_ready_line(line: str) -> Mapping[str, str] | None:
    """The addresses in a ready line; None for every other line."""
    if not line.startswith(READY_PREFIX):
        return None
    try:
        data = json.loads(line.removeprefix(READY_PREFIX))
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    return {str(name): str(address) for name, address in data.items()}
