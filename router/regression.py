"""Costs that are sums of known parts, learned from a stream of observations: non-negative least squares that forgets.

An observation says how long something took and how much of each part was in it (a *feature*: the seconds that the part
would take by a default, so that coefficients are multiples of the default and of one size). Errors count relative to
what was predicted: a step of 2 ms is fitted as well as one of 2 s, and one that took absurdly long, because the machine
stood still, pulls no more than any other.

Forgetting is directional: an observation fades only what was known about its own mixture of parts (L. Cao and
H. Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix", 2000). Ten
thousand equal ones teach one number and take nothing from what is known about others. What no observation has told
comes from a prior: see :func:`solve`.
"""

from collections.abc import Sequence
from math import log, sqrt

MEMORY = 32
"""So many observations of one mixture count; older ones have faded."""
_SURPRISE = log(1.5)
"""An observation that is off by more than this factor surprises. When most of the latest surprise to one side ..."""
_DRIFT = 0.7
_DRIFT_RATE = 0.4
"""... (this share, with this weight of the latest: three in a row; fewer are outliers), things have changed."""
_MUCH = log(2.5)
"""What is faster by so much counts twice: a machine may stand still for a moment, but nothing is quick by accident."""
_FAR = 4.0
"""A prediction that is off by more than this factor says nothing about weights."""
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
        self._drift = 0.0

    def is_drifting(self, seconds: float, *, predicted_s: float) -> bool:
        """Judge an observation that is about to be taken in. True when it and those before say that what was learned
        holds no more: whoever shares it should ``fade``."""
        error = log(max(seconds, _LEAST_S) / max(predicted_s, _LEAST_S))
        side = (error > _SURPRISE) - (error < -_SURPRISE)
        for _ in range(2 if error < -_MUCH else 1):
            self._drift += _DRIFT_RATE * (side - self._drift)
        if abs(self._drift) <= _DRIFT:
            return False
        self._drift = 0.0
        return True

    def observe(self, features: Sequence[float], seconds: float, *, predicted_s: float) -> None:
        """Take one in. Relative to what was predicted, and with less weight the longer it took: none pulls more than
        one that was as predicted pushes back."""
        seconds, predicted_s = max(seconds, _LEAST_S), max(predicted_s, _LEAST_S)
        scale = 1 / sqrt(max(seconds, predicted_s) * max(predicted_s, seconds / _FAR))
        x, value = [scale * each for each in features], scale * seconds
        gram, moment = self.gram, self.moment
        along = [dot(row, x) for row in gram]
        known = dot(along, x)
        fade = 1 / (MEMORY * known) if known > 1e-12 else 0.0
        taken = fade * dot(x, moment)
        for i, x_i in enumerate(x):
            row, faded = gram[i], fade * along[i]
            for j, x_j in enumerate(x):
                row[j] += x_i * x_j - faded * along[j]
            moment[i] += x_i * value - taken * along[i]

    def fade(self, share: float) -> None:
        """Only a share of it counts from now on."""
        self.gram = [[share * each for each in row] for row in self.gram]
        self.moment = [share * each for each in self.moment]

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
