"""The last rollout of every model: what its workers are to become. Operators ask for it, the launcher makes it true.

As with sizes the last word counts, and a restarted router hears it from the launcher with its age.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from core.clock import Clock
from core.config import ModelConfigSection
from core.errors import InvalidRequest
from core.types import Rollout


@dataclass(frozen=True, slots=True)
class _Told:
    rollout: Rollout
    at: float


class RolloutBook:
    def __init__(self, clock: Clock, models: Sequence[ModelConfigSection]) -> None:
        self._clock = clock
        self._models = [model.name for model in models]
        self._told: dict[str, _Told] = {}

    def rollouts(self) -> tuple[Rollout, ...]:
        now = self._clock.now()
        return tuple(replace(told.rollout, age_s=now - told.at) for told in self._told.values())

    def start(self, rollout: Rollout) -> None:
        """Raises InvalidRequest."""
        if rollout.model not in self._models:
            known = ", ".join(self._models)
            raise InvalidRequest(f"no pool of model {rollout.model!r} is configured; models: {known}", param="model")
        if not rollout.revision:
            raise InvalidRequest("a rollout needs the name of its revision", param="revision")
        self._told[rollout.model] = _Told(rollout, self._clock.now())

    def adopt(self, rollouts: Iterable[Rollout]) -> None:
        """A launcher's memory: what is younger than what is known here."""
        now = self._clock.now()
        for rollout in rollouts:
            known = self._told.get(rollout.model)
            if rollout.model in self._models and (known is None or now - rollout.age_s > known.at):
                self._told[rollout.model] = _Told(rollout, now - rollout.age_s)
