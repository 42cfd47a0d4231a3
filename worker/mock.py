"""What of a worker differs under mock execution beside its steps: moving the small KV takes as long as the real."""

import time
from collections.abc import Callable

from engine.engine import Engine
from engine.mock import MockExecution
from kvtransfer.backends.base import Backend
from kvtransfer.backends.paced import PacedBackend


def paced(backend: Backend, engine: Engine, *, now: Callable[[], float] = time.monotonic) -> Backend:
    """The backend itself where the engine runs a model, or its cost table is silent about hand-offs."""
    execution = engine.execution
    if not isinstance(execution, MockExecution):
        return backend
    token_bytes = engine.geometry.block_bytes // engine.geometry.block_size

    def cost_s(num_bytes: int) -> float:
        handoff = execution.costs.handoff
        return 0.0 if handoff is None else handoff.fixed_s + handoff.token_s * num_bytes / token_bytes

    return PacedBackend(backend, cost_s, now=now)
