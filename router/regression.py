"""Costs that are sums of known parts, learned from a stream of observations: non-negative least squares that forgets.

An observation says how long something took and how much of each part was in it (a *feature*: the seconds that the part
would take by a default, so that coefficients are multiples of the default and of one size). Errors count relative to
the observation: a step of 2 ms is fitted as well as one of 2 s, and one that took absurdly long, because the machine
stood still, pulls hardly at all.

Forgetting is directional: an observation fades only what was known about its own mixture of parts (L. Cao and
H. Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix", 2000). Ten
thousand equal ones teach one number and take nothing from what is known about others. What no observation has told
comes from a prior: see :func:`solve`.
"""

from collections.abc import Sequence
from math import log

MEMORY = 32
"""So many observations of one mixture count; older ones have faded."""
_SURPRISE = log(1.5)
"""An observation that is off by more than this factor surprises. When most of the latest surprise to one side ..."""
_DRIFT = 0.6
_DRIFT_RATE = 0.25
"""... (this share, with this weight of the latest: four in a row; fewer are outliers) the costs have changed ..."""
_DRIFT_MEMORY = 2
"""... and only so many count until the estimate has followed."""
_LEAST = _LEAST_S = 1e-6
_LEAST_SHARE = 0.1
"""A coefficient that a prior takes for next to nothing is doubted as if it were this share of the largest."""

Vector = list[float]
Matrix = list[Vector]


class Evidence:
    """What observations say together: weighted normal equations, ``gram @ coefficients = moment``.

    ``observe`` weighs each as one; ``coefficients @ gram @ coefficients`` is about their number.
    """

    __slots__ = ("_drift", "gram", "moment")

    def __init__(self, size: int) -> None:
        self.gram: Matrix = [[0.0] * size for _ in range(size)]
        self.moment: Vector = [0.0] * size
        self._drift: dict[str, float] = {}

    def observe(self, features: Sequence[float], seconds: float, *, predicted_s: float, kind: str = "") -> None:
        """Take one in. Drift is judged for each ``kind`` alone: the cost of one may change while others do not."""
        seconds, predicted_s = max(seconds, _LEAST_S), max(predicted_s, _LEAST_S)
        error = log(seconds / predicted_s)
        side = (error > _SURPRISE) - (error < -_SURPRISE)
        drift = self._drift.get(kind, 0.0)
        drift += _DRIFT_RATE * (side - drift)
        self._drift[kind] = drift
        scale = 1 / max(seconds, predicted_s)
        memory = _DRIFT_MEMORY if abs(drift) > _DRIFT else MEMORY
        self._add([scale * each for each in features], scale * seconds, memory=memory)

    def _add(self, x: Vector, value: float, *, memory: int) -> None:
        gram, moment = self.gram, self.moment
        along = [dot(row, x) for row in gram]
        known = dot(along, x)
        fade = 1 / (memory * known) if known > 1e-12 else 0.0
        taken = fade * dot(x, moment)
        for i, x_i in enumerate(x):
            row, faded = gram[i], fade * along[i]
            for j, x_j in enumerate(x):
                row[j] += x_i * x_j - faded * along[j]
            moment[i] += x_i * value - taken * along[i]

    def add(self, other: "Evidence", share: float = 1.0) -> None:
        """Add a share of what another one says."""
        for row, others in zip(self.gram, other.gram, strict=True):
            for j, each in enumerate(others):
                row[j] += share * each
        for i, each in enumerate(other.moment):
            self.moment[i] += share * each


def solve(evidence: Evidence, prior: Sequence[float], *, doubt: float, trust: float) -> Vector:
    """The non-negative coefficients that fit the evidence, and the prior where the evidence is silent.

    A coefficient that is off the prior by as much again costs as much as ``doubt`` observations that are missed
    altogether. The prior is first of all a shape: it is scaled to fit the evidence, against ``trust`` observations that
    say it fits. So what is four times slower than the prior where it was seen is four times slower everywhere,
    until it is seen to be otherwise.
    """
    seen = dot(prior, [dot(row, prior) for row in evidence.gram])
    scale = max(_LEAST, (dot(prior, evidence.moment) + trust) / (seen + trust))
    target = [scale * each for each in prior]
    least = max(_LEAST, _LEAST_SHARE * max(target))
    gram, moment = [list(row) for row in evidence.gram], list(evidence.moment)
    for i, each in enumerate(target):
        weight = doubt / max(each, least) ** 2
        gram[i][i] += weight
        moment[i] += weight * each
    return _solve_nonnegative(gram, moment)


def _solve_nonnegative(gram: Matrix, moment: Vector) -> Vector:
    """Least squares with x >= 0, by leaving out what would be negative (worst first) and taking back what would help:
    the active-set method of Lawson and Hanson, for a positive definite ``gram``."""
    size = len(moment)
    free = set(range(size))
    for _ in range(4 * size):
        order = sorted(free)
        x = [0.0] * size
        for i, each in zip(order, _solve_definite(gram, moment, order), strict=True):
            x[i] = each
        worst = min(order, key=x.__getitem__, default=0)
        if order and x[worst] < 0:
            free.discard(worst)
            continue
        gains = {i: moment[i] - dot(gram[i], x) for i in range(size) if i not in free}
        best = max(gains, key=gains.__getitem__, default=-1)
        if best < 0 or gains[best] <= 1e-9:
            return x
        free.add(best)
    return [max(0.0, each) for each in x]


def _solve_definite(gram: Matrix, moment: Vector, order: Sequence[int]) -> Vector:
    """``gram[order, order] @ x = moment[order]``, by elimination without pivoting: ``gram`` is positive definite."""
    rows = [[*(gram[i][j] for j in order), moment[i]] for i in order]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            if factor:
                row[k:] = [a - factor * b for a, b in zip(row[k:], pivot[k:], strict=True)]
    x: Vector = [0.0] * len(rows)
    for k in reversed(range(len(rows))):
        x[k] = (rows[k][-1] - dot(rows[k][k + 1 : -1], x[k + 1 :])) / rows[k][k]
    return x


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
