"""What to start and whom to retire so that pools come to their sizes: a function of what is wanted and what is there.

Who goes, when a pool is to shrink: first those that serve nobody (not started, failing, or lost), then suspects, then
those with the least work, of equals those with the least in their prefix cache, and then the youngest. Nobody is
killed: whoever serves is drained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


def plan(desired: Mapping[Pool, int], members: Iterable[Member]) -> Plan:
    """From sizes and members to steps; where they do not suffice now, the next call has the rest. Pools that are not in
    ``desired`` are left alone."""
    members = list(members)
    start: list[Pool] = []
    cancel: list[str] = []
    drain: list[str] = []
    for pool, size in desired.items():
        here = sorted((m for m in members if m.pool == pool), key=lambda member: member.worth)
        start += [pool] * (size - len(here))
        for member in here[: max(0, len(here) - size)]:
            if member.standing is Standing.IDLE:
                cancel.append(member.name)
            elif member.standing is not Standing.UNKNOWN:
                drain.append(member.name)
    return Plan(start=tuple(start), cancel=tuple(cancel), drain=tuple(drain))


def free_number(taken: Iterable[str], prefix: str) -> int:
    """The smallest number that no name of ``prefix-NUMBER`` has."""
    numbers = {name.removeprefix(f"{prefix}-") for name in taken if name.startswith(f"{prefix}-")}
    number = 0
    while str(number) in numbers:
        number += 1
    return number
