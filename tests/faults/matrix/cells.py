"""The cells of the matrix: what happens to whom while a request is in which state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.support.network import Loss


class Act(StrEnum):
    KILL = "kill -9"
    RESTART = "restart"
    STOP_3 = "stopped 3 s"
    STOP_8 = "stopped 8 s"
    STOP_20 = "stopped 20 s"
    DROP = "drop"
    RESET = "reset"
    BLACKHOLE = "blackhole"
    HALF_OPEN = "half_open"

    @property
    def loss(self) -> Loss | None:
        return Loss(self.value) if self in _LOSSES else None

    @property
    def lasts_s(self) -> float:
        """From its beginning until it is undone."""
        stops = {Act.STOP_3: 3.0, Act.STOP_8: 8.0, Act.STOP_20: 20.0}
        return stops.get(self, LOSS_S if self in _LOSSES else 0.0)


LOSS_S = 4.0
_UNDOING_S = 2.0
"""Until all is as before, in a sample's reckoning."""
_LOSSES = (Act.DROP, Act.RESET, Act.BLACKHOLE, Act.HALF_OPEN)
_PROCESSES = (Act.KILL, Act.RESTART, Act.STOP_3, Act.STOP_8, Act.STOP_20)


class Whom(StrEnum):
    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_AND_DECODE = "prefill and decode"
    GATEWAY_AND_PREFILL = "gateway and prefill"
    GATEWAY_AND_DECODE = "gateway and decode"


_COMPONENTS = (Whom.GATEWAY, Whom.ROUTER, Whom.PREFILL, Whom.DECODE)

STATES: Mapping[str, Sequence[tuple[str, str]]] = {
    "queued": (("decode", "decode.admit"), ("prefill", "prefill.queued")),
    "prefilling": (("prefill", "worker.stepped"), ("prefill", "prefill.computing")),
    "transferring": (("decode", "decode.opened"), ("decode", "decode.granted"), ("prefill", "prefill.sealed")),
    "first token": (("prefill", "prefill.seal"), ("decode", "decode.start")),
    "decoding": (("decode", "worker.stepped"),),
    "finishing": (("decode", "decode.finishing"),),
}
"""Where a request is held in each state: role and failpoint."""

POINTS = tuple(dict.fromkeys(point for places in STATES.values() for _, point in places))


@dataclass(frozen=True, slots=True)
class Cell:
    act: Act
    whom: Whom
    state: str
    role: str
    point: str
    index: int
    """Of the worker that is held."""

    def __str__(self) -> str:
        return f"{self.whom} {self.act}, {self.state} ({self.point} of {self.role}-{self.index})"


def all_cells(seed: int = 0) -> dict[str, list[Cell]]:
    """By part. Each part stands on its own, and takes some minutes."""
    choose = random.Random(seed)
    parts: dict[str, list[Cell]] = {}
    for part, act, whom, state in _combinations():
        role, point = choose.choice(STATES[state])
        parts.setdefault(part, []).append(Cell(act, whom, state, role, point, choose.randrange(2)))
    for cells in parts.values():
        choose.shuffle(cells)
    return parts


def sample(seed: int, lasts_s: float) -> list[Cell]:
    """Of every part in turn one whose act is short, of another state each, as long as together they last so long."""
    choose = random.Random(seed)
    parts = [[cell for cell in part if cell.act.lasts_s <= LOSS_S] for part in all_cells(seed).values()]
    chosen: list[Cell] = []
    for part in itertools.cycle([part for part in parts if part]):
        seen = {cell.state for cell in chosen[-len(STATES) + 1 :]}
        cell = choose.choice([cell for cell in part if cell.state not in seen] or part)
        lasts_s -= cell.act.lasts_s + _UNDOING_S
        if lasts_s < 0:
            return chosen
        chosen.append(cell)
    raise AssertionError("there are cells")


def _combinations() -> Iterator[tuple[str, Act, Whom, str]]:
    """Every act of a process at every state. Losses of a component, and of a gateway's pairs, at every other state, in
    turn; of the pair that hands off, at all."""
    for number, state in enumerate(STATES):
        for whom in _COMPONENTS:
            yield from ((f"{act}", act, whom, state) for act in _PROCESSES)
        for turn, act in enumerate(_LOSSES):
            for place, whom in enumerate(Whom):
                if whom is Whom.PREFILL_AND_DECODE or (number + turn + place) % 2 == 0:
                    part = "network of components" if whom in _COMPONENTS else "network of pairs"
                    yield part, act, whom, state
