"""How large a model's two pools should be: a pure function of demand, measured rates, the SLO, sizes and history.

Need is counted in workers, as real numbers. Prefill: prompt tokens that arrive in a second, over what one worker
computes in one, and what waits, over what one worker computes within half of the TTFT. Decode: answers that run or
wait (a decode worker knows of a request while its prompt is still computed), over the largest batch whose step is
within the TPOT, or KV in use over a worker's, whichever is more. A pool's target is the smallest size that its need
fills to ``up_use``.

What stands between a target and a decision, in this order::

    off                      nothing is decided
    missing                  a rate that nobody has measured: hold, whatever the rest says
    kv_hold                  prefill workers are full of KV that nobody fetches: more would not help, decode is short
    pending                  workers asked for before are not there yet: no more; what cannot be started is cancelled
    up: stable, cooldown     a target must be above the size for ``up_stable_s``; then at most ``max_step_up`` at once
    down: stable, cooldown   ... be below it for all of ``down_stable_s``; then one worker of one pool, and only while
          unready, use,      everybody is ready and nobody suspect, what is left would be used below ``down_use``, and
          work               running answers and their KV fit into it
    flip                     one pool wants more, the other can spare one, and a flip is faster than a start

A pool is never sized outside its ``min`` and ``max``. Without any demand and work the targets are the minima.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.config import AutoscaleConfig
from core.types import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE
FULL_HOLD = 0.8
"""Share of its KV that a prefill worker may hold for others before that is what limits it."""
FULL_KV = 0.85
"""Share of the KV of the workers that are left which running answers may fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool, summed over its workers."""

    desired: int
    ready: int
    num_unready: int = 0
    """Known, but starting, suspect or lost."""
    num_draining: int = 0
    problem: str = ""
    """Why the launcher cannot start more."""
    queued_tokens: int = 0
    """Prompt tokens that wait or are computed."""
    num_requests: int = 0
    """Running and waiting."""
    used_blocks: int = 0
    held_share: float = 0.0
    """Of its KV, what is held for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one worker does, as measured."""

    prefill_tokens_per_s: float
    batch: float
    """Answers that run together within the TPOT."""
    num_blocks: int
    """Of one decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a decision may depend on but its history. ``at`` is on any clock that goes on."""

    at: float
    prompt_tokens_per_s: float
    """That arrive, as projected to when a worker started now would be there."""
    pools: tuple[tuple[Role, PoolFacts], ...]
    rates: Rates | None
    """None: not measured yet."""
    num_waiting: int = 0
    waiting_tokens: int = 0
    """Requests that wait at the router, and the tokens of their prompts."""

    def pool(self, role: Role) -> PoolFacts:
        return dict(self.pools)[role]


class Action(StrEnum):
    """A closed set: labels of the metric of decisions."""

    HOLD = "hold"
    SCALE = "scale"
    FLIP = "flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and why. ``targets`` are what the sizes would be without guards; the next decisions need them."""

    at: float
    action: Action
    reason: str
    """One word of the list above for each pool, by role; a closed set."""
    targets: tuple[tuple[Role, int], ...] = ()
    needs: tuple[tuple[Role, float], ...] = ()
    steps: tuple[tuple[Role, int], ...] = ()
    """SCALE and FLIP: by how many workers the pools that change are changed."""
    flip_from: Role | None = None

    def target(self, role: Role) -> int | None:
        return dict(self.targets).get(role)

    def step(self, role: Role) -> int:
        return dict(self.steps).get(role, 0)


def decide(seen: Observation, settings: AutoscaleConfig, history: Sequence[Decision]) -> Decision:
    """``history``: decisions before this one that were carried out (or would have been), oldest first, over at least
    ``down_stable_s``."""
    if settings.mode == "off":
        return Decision(at=seen.at, action=Action.HOLD, reason="off")
    if seen.rates is None:
        return Decision(at=seen.at, action=Action.HOLD, reason="missing")
    needs = _needs(seen, seen.rates, settings)
    targets = {role: _target(role, need, seen, settings) for role, need in needs.items()}
    is_held = PREFILL in targets and seen.pool(PREFILL).held_share >= FULL_HOLD
    if is_held:
        targets[PREFILL] = min(targets[PREFILL], seen.pool(PREFILL).desired)
        targets[DECODE] = _clamp(max(targets[DECODE], seen.pool(DECODE).desired + 1), DECODE, settings)
    judge = _Judge(seen, settings, (*history, _wish(seen, targets)), needs)
    sizes: dict[Role, int] = {}
    reasons: dict[Role, str] = {}
    for role, target in targets.items():
        sizes[role], reasons[role] = judge.up(role, target) if target >= seen.pool(role).desired else judge.same(role)
    is_growing = any(sizes[role] > seen.pool(role).desired for role in sizes)
    spare = [role for role, target in targets.items() if target < seen.pool(role).desired]
    action, flip_from = Action.HOLD, None
    for role in spare:
        size, reasons[role] = judge.down(role)
        if reasons[role] == "cancel_pending":
            sizes[role] = size
        elif size < sizes[role] and is_growing and len(sizes) == 2:
            flip_from = role
            other = next(one for one in sizes if one is not role)
            sizes = {role: size, other: seen.pool(other).desired + 1}
        elif size < sizes[role] and all(sizes[one] == seen.pool(one).desired for one in sizes):
            sizes[role] = size  # one pool, one worker
    steps = {role: step for role, size in sizes.items() if (step := size - seen.pool(role).desired)}
    if steps:
        action = Action.SCALE if flip_from is None else Action.FLIP
    if is_held:
        reasons[PREFILL] = "kv_hold"
    return Decision(
        at=seen.at,
        action=action,
        reason=" ".join(f"{role}:{reason}" for role, reason in reasons.items()),
        targets=tuple(targets.items()),
        needs=tuple(needs.items()),
        steps=tuple(steps.items()),
        flip_from=flip_from,
    )


# -- need -------------------------------------------------------------------------------------------------------------


def _needs(seen: Observation, rates: Rates, settings: AutoscaleConfig) -> dict[Role, float]:
    """In workers. A unified worker does both."""
    facts = dict(seen.pools)
    readers = facts.get(PREFILL) or facts[Role.UNIFIED]
    writers = facts.get(DECODE) or facts[Role.UNIFIED]
    waiting_s = (readers.queued_tokens + seen.waiting_tokens) / rates.prefill_tokens_per_s
    prefill = max(seen.prompt_tokens_per_s / rates.prefill_tokens_per_s, waiting_s / (settings.ttft_s / 2))
    answers = writers.num_requests + seen.num_waiting
    decode = max(answers / rates.batch, writers.used_blocks / rates.num_blocks)
    if PREFILL in facts:
        return {PREFILL: prefill, DECODE: decode}
    return {Role.UNIFIED: prefill + decode}


def _target(role: Role, need: float, seen: Observation, settings: AutoscaleConfig) -> int:
    return _clamp(math.ceil(need / settings.up_use - 1e-9), role, settings)


def _clamp(size: int, role: Role, settings: AutoscaleConfig) -> int:
    limits = settings.limits(role)
    return max(limits.min, min(limits.max, size))


def _wish(seen: Observation, targets: dict[Role, int]) -> Decision:
    return Decision(at=seen.at, action=Action.HOLD, reason="", targets=tuple(targets.items()))


# -- guards -----------------------------------------------------------------------------------------------------------


class _Judge:
    """The guards of one decision: each gives the size of a pool and the word that says why."""

    def __init__(
        self,
        seen: Observation,
        settings: AutoscaleConfig,
        history: Sequence[Decision],
        needs: dict[Role, float],
    ) -> None:
        self._seen = seen
        self._settings = settings
        self._history = history
        """With the wish of now at its end."""
        self._needs = needs

    def same(self, role: Role) -> tuple[int, str]:
        return self._seen.pool(role).desired, "enough"

    def up(self, role: Role, target: int) -> tuple[int, str]:
        pool, settings = self._seen.pool(role), self._settings
        if target == pool.desired:
            limit = settings.limits(role).max
            is_short = self._needs[role] > limit * settings.up_use
            return pool.desired, "at_max" if target == limit and is_short else "enough"
        if pool.desired > pool.ready:
            return pool.desired, "pending"
        targets = self._targets_since(role, settings.up_stable_s)
        if targets is None or min(targets) <= pool.desired:
            return pool.desired, "up_unstable"
        if self._changed_within(role, settings.up_cooldown_s, is_up=True):
            return pool.desired, "up_cooldown"
        return min(min(targets), pool.desired + settings.max_step_up), "up"

    def down(self, role: Role) -> tuple[int, str]:
        pool, settings = self._seen.pool(role), self._settings
        if pool.problem and pool.desired > pool.ready >= settings.limits(role).min:
            return max(pool.ready, self._target(role)), "cancel_pending"
        if any(facts.num_unready or facts.num_draining or facts.ready < facts.desired for _, facts in self._seen.pools):
            return pool.desired, "down_unready"
        targets = self._targets_since(role, settings.down_stable_s)
        if targets is None or max(targets) >= pool.desired:
            return pool.desired, "down_unstable"
        if any(self._changed_within(one, settings.down_cooldown_s) for one, _ in self._seen.pools):
            return pool.desired, "down_cooldown"
        left = pool.desired - 1
        if left < 1 and (pool.num_requests or pool.used_blocks or pool.queued_tokens):
            return pool.desired, "down_work"
        if left >= 1 and self._needs[role] / left >= settings.down_use:
            return pool.desired, "down_use"
        rates = self._seen.rates
        assert rates is not None
        if role is not PREFILL and pool.used_blocks > left * rates.num_blocks * FULL_KV:
            return pool.desired, "down_work"
        return left, "down"

    def _target(self, role: Role) -> int:
        target = self._history[-1].target(role)
        assert target is not None
        return target

    def _targets_since(self, role: Role, seconds: float) -> list[int] | None:
        """Every target of the last ``seconds``; None where the history is shorter, or was interrupted by a decision
        without one."""
        since = self._seen.at - seconds
        found: list[int] = []
        for one in reversed(self._history):
            target = one.target(role)
            if target is None:
                return None
            found.append(target)
            if one.at <= since:
                return found
        return None

    def _changed_within(self, role: Role, seconds: float, *, is_up: bool = False) -> bool:
        """Whether the pool's size was decided anew that lately (``is_up``: to a larger one)."""
        since = self._seen.at - seconds
        return any(one.at > since and (one.step(role) > 0 if is_up else one.step(role) != 0) for one in self._history)
