"""From scores to tokens. A row's token depends on its own scores, options and key, never on its neighbours.

Order: raw scores -> log probabilities (if asked for) -> what :mod:`engine.shaping` forbids and weighs -> greedy, or
temperature, min_p, top_k, top_p and one exact draw by Gumbel-max (the argmax of score + Gumbel noise is a softmax
sample).

The noise is a pure function of (seed, choice, absolute position, token id): :func:`sampling_key` mixes the first three
into 64 bits (SplitMix64, Steele et al. 2014), :func:`gumbel` mixes those with the id in two rounds of 32-bit arithmetic
(murmur3's finaliser and C. Wellons' lowbias32, which vector units multiply natively) and a GPU kernel can repeat it.
So a draw does not depend on the batch, the step or the worker it happens on, and only candidates need noise: the noise
is bounded, so tokens too far behind cannot win.

Ties are kept: ``top_k`` and ``top_p`` cut at a value, so equal scores stay together.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from core.errors import InternalError, InvalidRequest, ServingError
from core.types import SamplingParams, TokenLogprobs
from engine.sequence import Sequence
from engine.shaping import NEVER, shape

_DEAD_END = (
    "no token is left to choose: allowed_token_ids, bad_words, logit_bias, min_tokens or the grammar forbid them all"
)
_MASK = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NEAR = -8.0
_FLOORS = (-8.0, -16.0, -32.0, NEVER)
"""Below the peak at 0: what is looked for is sought among few tokens first."""
_MAX_NOISE = 16.7
"""No noise is above -log(2^-24)."""
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The outcome of one row: a token, or the error that ends its sequence."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    is_end: bool = False
    """The grammar has nothing to say behind what there is: the token ends the choice, whatever its minimum length."""
    error: ServingError | None = None


def sample(logits_RV: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """One token for each sequence from its row of raw scores. ``logits_RV`` is overwritten."""
    assert logits_RV.shape[0] == len(sequences)
    errors: dict[int, ServingError] = {}
    for row, peak in enumerate(logits_RV.amax(-1).tolist()):  # NaN wins every maximum
        if not _is_finite(peak):
            errors[row] = InternalError("the model's scores are not finite for this request")
            logits_RV[row] = 0.0
    wanting = [row for row, each in enumerate(sequences) if each.sampling.logprobs is not None]
    raw_RV = logits_RV[wanting]  # a copy
    shaped = shape(logits_RV, sequences)
    errors = {**shaped.errors, **errors}
    ended: set[int] = set()
    for row in _without_choice(logits_RV, [row for row in sorted(shaped.rows) if row not in errors]):
        sequence = sequences[row]
        if sequence.grammar is not None and sequence.grammar.is_complete:
            ended.add(row)
        else:
            errors[row] = InvalidRequest(_DEAD_END)
    for row in (*errors, *ended):
        logits_RV[row] = 0.0
    tokens = _choose(logits_RV, sequences)
    for row in ended:
        tokens[row] = sequences[row].sampling.eos_token_ids[0]
    num_top = [sequences[row].sampling.logprobs or 0 for row in wanting]
    logprobs = token_logprobs(raw_RV, [tokens[row] for row in wanting], num_top)
    told = dict(zip(wanting, logprobs, strict=True))
    return [
        Sampled(error=errors[row])
        if row in errors
        else Sampled(token_id=token, logprobs=told.get(row), is_end=row in ended)
        for row, token in enumerate(tokens)
    ]


def _without_choice(scores_RV: Tensor, rows: list[int]) -> list[int]:
    """Those of ``rows`` in which every token is forbidden."""
    if not rows:
        return []
    peaks = scores_RV[rows].amax(-1).tolist()
    return [row for row, peak in zip(rows, peaks, strict=True) if not _is_finite(peak)]


# -- choosing ---------------------------------------------------------------------------------------------------------


def _choose(scores_RV: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """numpy from here on: on CPU its searches are many times faster than torch's, and the first of equals wins."""
    rows_RV: Scores = scores_RV.numpy()
    greedy = [row for row, sequence in enumerate(sequences) if sequence.sampling.is_greedy]
    tokens = [0] * len(sequences)
    if greedy:
        best = (rows_RV if len(greedy) == len(sequences) else rows_RV[greedy]).argmax(-1).tolist()
        for row, token in zip(greedy, best, strict=True):
            tokens[row] = token
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if not sampling.is_greedy:
            # The peak becomes 0, so that a tiny temperature drives the rest to minus infinity and not beyond numbers.
            scores_V = rows_RV[row]
            scores_V -= scores_V.max()
            with np.errstate(over="ignore"):
                scores_V /= np.float32(sampling.temperature)
            tokens[row] = _draw(scores_V, sequence, _least(scores_V, sampling))
    return tokens


def _draw(scores_V: Scores, sequence: Sequence, least: float) -> int:
    """A sample of the tokens that score ``least`` or more. Far ones are looked at only if their noise could suffice."""
    key = sampling_key(sequence.sampling.seed, sequence.key.choice, len(sequence.tokens))
    near = np.flatnonzero(scores_V >= max(least, _NEAR))
    noisy = scores_V[near] + gumbel(key, near)
    best = int(noisy.argmax())
    reach = max(least, float(noisy[best]) - _MAX_NOISE)
    if reach >= _NEAR:
        return int(near[best])
    far = np.flatnonzero((scores_V < _NEAR) & (scores_V >= reach))
    noisy_far = scores_V[far] + gumbel(key, far)
    if len(far) and noisy_far.max() > noisy[best]:
        return int(far[int(noisy_far.argmax())])
    return int(near[best])


def _least(scores_V: Scores, sampling: SamplingParams) -> float:
    """The score down to which min_p, top_k and top_p keep tokens; the peak is 0."""
    least = math.log(sampling.min_p) if sampling.min_p > 0.0 else NEVER
    if 0 < sampling.top_k < len(scores_V):
        least = max(least, _kth(scores_V, sampling.top_k))
    if sampling.top_p < 1.0:
        least = max(least, _nucleus(scores_V, least, sampling.top_p))
    return least


def _kth(scores_V: Scores, k: int) -> float:
    for floor in _FLOORS:
        near = scores_V[scores_V >= floor]
        if len(near) >= k:
            return float(np.partition(near, len(near) - k)[len(near) - k])
    raise AssertionError("the lowest floor keeps everything")


def _nucleus(scores_V: Scores, least: float, top_p: float) -> float:
    """The score down to which the most likely tokens hold ``top_p`` of the mass of those not below ``least``."""
    kept = scores_V if least == NEVER else scores_V[scores_V >= least]
    goal = top_p * np.exp(kept).sum(dtype=np.float64)
    for floor in _FLOORS:
        near = np.sort(kept[kept >= floor])[::-1]
        # A running sum does not depend on how many follow, so neither does the cut.
        at = int(np.searchsorted(np.exp(near).cumsum(dtype=np.float64), goal))
        if at < len(near):
            return float(near[at])
    return least  # rounding: the whole sum stays a hair below the goal


# -- the generator ----------------------------------------------------------------------------------------------------


def mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def key_prefix(seed: int, choice: int) -> int:
    """What the keys of all draws of a choice begin with."""
    key = 0
    for part in (seed, choice):
        key = mix(key + GAMMA * ((part & _MASK) + 1))
    return key


def sampling_key(seed: int, choice: int, position: int) -> int:
    """64 bits that stand for one draw: the token at absolute ``position`` of a choice."""
    return mix(key_prefix(seed, choice) + GAMMA * ((position & _MASK) + 1))


def gumbel(key: int, ids: npt.NDArray[np.integer[Any]]) -> Scores:
    """Standard Gumbel noise in float32 for each id: -log(-log(u)), u from the top 23 bits of two rounds over the id.

    23 bits, because 24 and a half would round u to 1 in float32. Integers wrap around as in C.
    """
    bits = ids.astype(np.uint32)
    bits *= np.uint32(0x9E3779B1)
    bits += np.uint32(key & 0xFFFFFFFF)
    _round(bits, 16, 0x21F0AAAD, 15, 0x735A2D97, 15)
    bits += np.uint32(key >> 32)
    _round(bits, 16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
    bits >>= np.uint32(9)
    uniform = bits.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-23)
    for _ in range(2):
        np.log(uniform, out=uniform)
        np.negative(uniform, out=uniform)
    return uniform


def _round(bits: npt.NDArray[np.uint32], shift_1: int, mul_1: int, shift_2: int, mul_2: int, shift_3: int) -> None:
    bits ^= bits >> np.uint32(shift_1)
    bits *= np.uint32(mul_1)
    bits ^= bits >> np.uint32(shift_2)
    bits *= np.uint32(mul_2)
    bits ^= bits >> np.uint32(shift_3)


# -- log probabilities ------------------------------------------------------------------------------------------------


def token_logprobs(raw_RV: Tensor, tokens: Seq[int], num_top: Seq[int]) -> list[TokenLogprobs]:
    """For each row of raw scores its token's log probability and rank, and the ``num_top`` most likely ones."""
    rows_RV: Scores = raw_RV.numpy()
    return [_row_logprobs(*each) for each in zip(rows_RV, tokens, num_top, strict=True)]


def _row_logprobs(raw_V: Scores, token: int, num_top: int) -> TokenLogprobs:
    peak = raw_V.max()
    log_total = float(peak) + math.log(np.exp(raw_V - peak).sum(dtype=np.float64))
    top = [(int(one), float(raw_V[one]) - log_total) for one in _most_likely(raw_V, peak, num_top)]
    rank = int(np.count_nonzero(raw_V > raw_V[token])) + 1
    return TokenLogprobs(logprob=float(raw_V[token]) - log_total, rank=rank, top=tuple(top))


def _most_likely(raw_V: Scores, peak: np.float32, count: int) -> npt.NDArray[np.intp]:
    """Ids of the best scores, best first; of equals the lower id first."""
    if count == 0:
        return np.empty(0, np.intp)
    near = np.flatnonzero(raw_V >= peak + np.float32(_NEAR))
    if len(near) < count:
        near = np.arange(len(raw_V))
    if len(near) > count:
        near = near[raw_V[near] >= np.partition(raw_V[near], len(near) - count)[len(near) - count]]
    return near[np.argsort(-raw_V[near], kind="stable")][:count]


def _is_finite(value: float) -> bool:
    return value - value == 0.0
