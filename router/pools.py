"""The desired size of every pool. The router owns it, operators change it, launchers watch it and reconcile.

The last word counts, pool by pool. A restarted router begins with the configuration's sizes and hears from the launcher
what was said since, with its age; what an operator said to the new router in between is younger, and stays.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.config import ModelConfigSection
from core.errors import InvalidRequest
from core.types import PoolProblem, PoolSize, Role

MAX_REPLICAS = 1024


@dataclass(slots=True, kw_only=True)
class _Pool:
    replicas: int
    said_at: float | None = None
    """On the router's clock; None: the configuration's."""
    problem: str = ""


class PoolBook:
    """Desired sizes by (model, role): those of the configuration until somebody says otherwise."""

    def __init__(self, clock: Clock, models: Sequence[ModelConfigSection]) -> None:
        self._clock = clock
        self._pools: dict[tuple[str, Role], _Pool] = {
            (model.name, role): _Pool(replicas=pool.replicas) for model in models for role, pool in model.pools.items()
        }
        self._changed = asyncio.Event()

    def sizes(self) -> tuple[PoolSize, ...]:
        now = self._clock.now()
        return tuple(
            PoolSize(
                model=model,
                role=role,
                replicas=pool.replicas,
                age_s=None if pool.said_at is None else now - pool.said_at,
            )
            for (model, role), pool in self._pools.items()
        )

    def has(self, model: str, role: Role) -> bool:
        """Whether it is configured."""
        return (model, role) in self._pools

    def has_model(self, name: str) -> bool:
        """Whether a pool of it is configured."""
        return any(model == name for model, _ in self._pools)

    def desired(self, model: str, role: Role) -> int:
        """0 for a pool that is not configured."""
        pool = self._pools.get((model, role))
        return 0 if pool is None else pool.replicas

    def problem(self, model: str, role: Role) -> str:
        """Why the launcher cannot bring it to its size; empty when nothing is known."""
        pool = self._pools.get((model, role))
        return "" if pool is None else pool.problem

    def scale(self, pools: Sequence[PoolSize]) -> tuple[PoolSize, ...]:
        """Set the given pools, all or none, and wake the watchers. Raises InvalidRequest; returns all sizes."""
        for pool in pools:
            if not self.has(pool.model, pool.role):
                known = ", ".join(f"{model} {role}" for model, role in self._pools)
                raise InvalidRequest(f"model {pool.model!r} has no {pool.role} pool; pools: {known}", param="pools")
            if not 0 <= pool.replicas <= MAX_REPLICAS:
                raise InvalidRequest(f"{pool.replicas} replicas: give 0 to {MAX_REPLICAS}", param="pools")
        self._set((pool, self._clock.now()) for pool in pools)
        return self.sizes()

    def adopt(self, pools: Iterable[PoolSize]) -> tuple[PoolSize, ...]:
        """A launcher's memory: what was said later than what is known here counts. Returns all sizes."""
        now = self._clock.now()
        younger: list[tuple[PoolSize, float]] = []
        for pool in pools:
            mine = self._pools.get((pool.model, pool.role))
            if mine is None or pool.age_s is None or not 0 <= pool.replicas <= MAX_REPLICAS:
                continue
            said_at = now - pool.age_s
            if mine.said_at is None or said_at > mine.said_at:
                younger.append((pool, said_at))
        self._set(younger)
        return self.sizes()

    def note_problems(self, problems: Iterable[PoolProblem]) -> None:
        """The launcher's, all of them."""
        messages = {(problem.model, problem.role): problem.message for problem in problems}
        for key, pool in self._pools.items():
            pool.problem = messages.get(key, "")

    def _set(self, pools: Iterable[tuple[PoolSize, float]]) -> None:
        is_changed = False
        for size, said_at in pools:
            pool = self._pools[size.model, size.role]
            is_changed |= pool.replicas != size.replicas
            pool.replicas, pool.said_at = size.replicas, said_at
        if is_changed:
            self.wake()

    def wake(self) -> None:
        """Something changed that watchers look at: a size, or who is there."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[tuple[PoolSize, ...], None]:
        """The sizes now, and again after every change. Changes in between are skipped, never missed."""
        while True:
            changed = self._changed
            yield self.sizes()
            await changed.wait()
