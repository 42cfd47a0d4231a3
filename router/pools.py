"""The desired size of every pool. The router owns it, operators change it, launchers watch it and reconcile."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from core.config import ModelConfigSection
from core.errors import InvalidRequest
from core.types import PoolSize, Role

MAX_REPLICAS = 1024


class PoolBook:
    """Desired sizes by (model, role): those of the configuration until an operator says otherwise."""

    def __init__(self, models: Sequence[ModelConfigSection]) -> None:
        self._desired: dict[tuple[str, Role], int] = {
            (model.name, role): pool.replicas for model in models for role, pool in model.pools.items()
        }
        self._changed = asyncio.Event()

    def sizes(self) -> tuple[PoolSize, ...]:
        return tuple(
            PoolSize(model=model, role=role, replicas=replicas) for (model, role), replicas in self._desired.items()
        )

    def desired(self, model: str, role: Role) -> int:
        """0 for a pool that is not configured."""
        return self._desired.get((model, role), 0)

    def scale(self, pools: Sequence[PoolSize]) -> tuple[PoolSize, ...]:
        """Set the given pools, all or none, and wake the watchers. Raises InvalidRequest; returns all sizes."""
        for pool in pools:
            if (pool.model, pool.role) not in self._desired:
                known = ", ".join(f"{model} {role}" for model, role in self._desired)
                raise InvalidRequest(f"model {pool.model!r} has no {pool.role} pool; pools: {known}", param="pools")
            if not 0 <= pool.replicas <= MAX_REPLICAS:
                raise InvalidRequest(f"{pool.replicas} replicas: give 0 to {MAX_REPLICAS}", param="pools")
        before = dict(self._desired)
        self._desired.update({(pool.model, pool.role): pool.replicas for pool in pools})
        if self._desired != before:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return self.sizes()

    async def watch(self) -> AsyncGenerator[tuple[PoolSize, ...], None]:
        """The sizes now, and again after every change. Changes in between are skipped, never missed."""
        while True:
            changed = self._changed
            yield self.sizes()
            await changed.wait()
