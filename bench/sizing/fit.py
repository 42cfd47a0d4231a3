"""Fits the cost laws of a worker to what was measured, and refuses what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.sizing.profile import Fit
from core.costs import HandoffCosts, StepCosts
from core.errors import InternalError

LEAST_R2 = 0.95
"""Of prompts and steps. Transfers may be lost in noise where they hardly cost anything."""
_SMALL = 0.1
"""Of a prompt's time: what a transfer may be off by without being refused."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds, medians of several."""

    prompts: Sequence[tuple[int, float]]
    """(tokens, TTFT) of prompts that nothing else was beside, each read in one step."""
    steps: Sequence[tuple[int, int, float]]
    """(answers, context of each, step)."""
    gaps: Sequence[tuple[int, float]] = ()
    """(tokens of the prompt, from the first token to the second) of answers that were alone; none without hand-offs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    costs: StepCosts
    first_s: float
    fits: tuple[Fit, ...]


def fit(measured: Measured, *, where: str) -> Laws:
    """Raises InternalError for a bad fit: it says which law, how bad, and what to try."""
    steps = np.array(measured.steps, float)
    ones = np.ones(len(steps))
    (step_s, row_s, position_s), step_fit = _solve(
        "decode steps", [ones, steps[:, 0], steps[:, 0] * steps[:, 1]], steps[:, 2]
    )
    prompts = np.array(measured.prompts, float)
    lengths = prompts[:, 0]
    (fixed_s, token_s, pair_s), prompt_fit = _solve(
        "prompts", [np.ones(len(prompts)), lengths, lengths * (lengths + 1) / 2], prompts[:, 1]
    )
    # A step that reads a few tokens takes about as long as one that writes a few; the rest is what lies around it.
    own_s = min(fixed_s, step_s + row_s)
    handoff, fits = None, [prompt_fit, step_fit]
    if measured.gaps:
        handoff, handoff_fit = _fit_handoff(measured, one_step_s=step_s + row_s)
        fits.append(handoff_fit)
    costs = StepCosts.linear(
        fixed_s=own_s,
        prompt_token_s=token_s,
        decode_row_s=max(0.0, row_s),
        prompt_pair_s=pair_s,
        decode_position_s=position_s,
        handoff=handoff,
    ).model_copy(update={"measured": where, "decode": _rows(step_s, row_s), "shared_s": min(own_s, step_s)})
    return Laws(costs=costs, first_s=max(0.0, fixed_s - own_s), fits=tuple(fits))


def _rows(fixed_s: float, row_s: float) -> tuple[tuple[int, float], ...]:
    return (1, fixed_s + row_s), (2, fixed_s + 2 * row_s)


def _fit_handoff(measured: Measured, *, one_step_s: float) -> tuple[HandoffCosts, Fit]:
    """The second token waits for what is still to move, and then for half a step and a step."""
    gaps = np.array(measured.gaps, float)
    moved = np.maximum(0.0, gaps[:, 1] - one_step_s)
    (fixed_s, token_s), found = _solve("transfers", [np.ones(len(gaps)), gaps[:, 0]], moved, least=-np.inf)
    ttfts = dict(measured.prompts)
    beside = float(np.median([ttfts.get(int(length), np.inf) for length in gaps[:, 0]]))
    off = float(np.median(np.abs(moved - fixed_s - token_s * gaps[:, 0])))
    if found.r2 < LEAST_R2 and off > _SMALL * beside:
        raise _bad(found)
    return HandoffCosts(fixed_s=fixed_s, token_s=token_s), found


def _solve(
    name: str, columns: Sequence[Floats], seconds: Floats, *, least: float = LEAST_R2
) -> tuple[tuple[float, ...], Fit]:
    """Least squares of relative errors, no coefficient below 0. Raises InternalError below ``least``."""
    weights = 1 / np.maximum(seconds, 1e-3)
    matrix = np.stack(columns, axis=1)
    active = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while active:
        found, *_ = np.linalg.lstsq(matrix[:, active] * weights[:, None], seconds * weights, rcond=None)
        if (found >= 0).all():
            solution[active] = found
            break
        del active[int(np.argmin(found * np.abs(matrix[:, active]).max(axis=0)))]
    fitted = matrix @ solution
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((seconds - fitted) ** 2).sum()) / spread if spread else 1.0
    points = tuple((float(one), float(other)) for one, other in zip(seconds, fitted, strict=True))
    told = Fit(name=name, r2=r2, points=points)
    if r2 < least:
        raise _bad(told)
    return tuple(float(each) for each in solution), told


def _bad(found: Fit) -> InternalError:
    worst = max(found.points, key=lambda point: abs(point[0] - point[1]) / max(point[0], 1e-9))
    return InternalError(
        f"{found.name} do not follow their law: R2 is {found.r2:.3f}, less than {LEAST_R2} (worst: measured "
        f"{1e3 * worst[0]:.1f} ms, fitted {1e3 * worst[1]:.1f} ms). Is something else running on these workers? "
        "Try again in quiet, or with more --repeats"
    )
