"""What to start and whom to retire so that pools come to their sizes: a function of what is wanted and what is there.

Who goes, when a pool is to shrink: first those that serve nobody (not started, failing, or lost), then suspects, then
those with the least work, of equals those with the least in their prefix cache, and then the youngest. Nobody is
killed: whoever serves is drained.

A model whose workers are to become another revision is replaced in lockstep: each pool may have one worker more than
its size; when the new ones of all pools serve, each pool that has one too many drains an old one; when those have left,
the next ones are started. The last old worker of a pool waits for the old ones of the other: they would have nobody to
hand off with. A new worker that does not come to serve stops it there, with every old one still serving.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from core.types import Role

Pool = tuple[str, Role]
"""(model, role)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker that this launcher runs, as launcher and router know it."""

    name: str
    pool: Pool | None
    """Where it is, or will be after its flip; None: it leaves, and counts nowhere."""
    standing: "Standing"
    work: int = 0
    """Requests, leases and transfers."""
    cached_blocks: int = 0
    age: int = 0
    """Higher for those started later."""
    revision: str = ""
    is_ready: bool = False
    """The router places requests on it."""

    @property
    def worth(self) -> tuple[int, int, int, int]:
        return self.standing, self.work, self.cached_blocks, -self.age


class Standing(IntEnum):
    """What a worker may have to lose; who has least goes first."""

    IDLE = 0
    """It never served, does not run, or is lost: it may be stopped."""
    SUSPECT = 1
    READY = 2
    UNKNOWN = 3
    """It serves, and the router does not know it (yet, or again): it cannot be drained now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps towards the sizes; none when they are reached."""

    start: tuple[Pool, ...] = ()
    """One worker each."""
    cancel: tuple[str, ...] = ()
    """Stop at once: they serve nobody."""
    drain: tuple[str, ...] = ()


def plan(
    desired: Mapping[Pool, int],
    members: Iterable[Member],
    *,
    targets: Mapping[str, str] | None = None,
    leaving: Collection[str] = (),
) -> Plan:
    """From sizes and members to steps; where they do not suffice now, the next call has the rest. Pools that are not in
    ``desired`` are left alone. ``targets``: by model, the revision that its workers are to have. ``leaving``: models of
    which a worker is on its way out."""
    members = list(members)
    steps = _Steps()
    for model in dict.fromkeys(model for model, _ in desired):
        sizes = {pool: size for pool, size in desired.items() if pool[0] == model}
        here = [member for member in members if member.pool in sizes]
        target = (targets or {}).get(model)
        if target is None or all(member.revision == target for member in here):
            _resize(sizes, here, steps)
        else:
            _replace(sizes, here, target, model in leaving, steps)
    return Plan(start=tuple(steps.start), cancel=tuple(steps.cancel), drain=tuple(steps.drain))


@dataclass(slots=True)
class _Steps:
    start: list[Pool] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)

    def end(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.standing is Standing.IDLE:
                self.cancel.append(member.name)
            elif member.standing is not Standing.UNKNOWN:
                self.drain.append(member.name)


def _resize(sizes: Mapping[Pool, int], members: list[Member], steps: _Steps) -> None:
    for pool, size in sizes.items():
        here = sorted((m for m in members if m.pool == pool), key=lambda member: member.worth)
        steps.start += [pool] * (size - len(here))
        steps.end(here[: max(0, len(here) - size)])


def _replace(sizes: Mapping[Pool, int], members: list[Member], target: str, is_leaving: bool, steps: _Steps) -> None:
    """One more step of a rollout."""
    idle = [m for m in members if m.revision != target and m.standing is Standing.IDLE]
    steps.end(idle)
    new = {pool: [m for m in members if m.pool == pool and m.revision == target] for pool in sizes}
    old = {pool: [m for m in members if m.pool == pool and m.revision != target and m not in idle] for pool in sizes}
    serve = all(m.is_ready for here in new.values() for m in here)
    has_path = serve and all(new[pool] or not size for pool, size in sizes.items())
    surplus = {pool: len(new[pool]) + len(old[pool]) - size for pool, size in sizes.items()}
    are_last = all(len(old[pool]) <= 1 and (surplus[pool] > 0 or not old[pool]) for pool in sizes)
    for pool, size in sizes.items():
        if len(new[pool]) > size:
            steps.end(sorted(new[pool], key=lambda member: member.worth)[: len(new[pool]) - size])
        elif surplus[pool] > 0:
            if has_path and (are_last or len(old[pool]) > 1):
                steps.end(sorted(old[pool], key=lambda member: member.worth)[:1])
        elif len(new[pool]) < size and serve and not is_leaving:
            steps.start.append(pool)


def free_number(taken: Iterable[str], prefix: str) -> int:
    """The smallest number that no name of ``prefix-NUMBER`` has."""
    numbers = {name.removeprefix(f"{prefix}-") for name in taken if name.startswith(f"{prefix}-")}
    number = 0
    while str(number) in numbers:
        number += 1
    return number
