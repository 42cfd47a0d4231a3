"""From scores to tokens without a sort: the sampler of :mod:`engine.sampler`, with the same noise for the same (seed,
choice, position, token id).

One program has one row. It finds the score down to which ``top_k`` and ``top_p`` keep tokens by choosing four bits of
it at a time (radix selection: scores behind the peak are not positive, so their bits, as integers, grow as they fall),
then draws once by Gumbel-max. Rows without an option do not pay for it. Equal scores stay together, and the lowest id
of equals wins.

Legend: R rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait
from engine.sampler import gumbel

TOKENS = 4096
NOT_FINITE = -1
"""The token of a row with a score that is no number, or with nothing but forbidden tokens."""
BINS = tl.constexpr(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How each row chooses: ``[R]`` each. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything."""

    temperature: Tensor
    top_k: Tensor
    """int32"""
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    """int64, the bits of :func:`engine.sampler.sampling_key`."""

    def check(self, num_rows: int) -> None:
        for name in ("temperature", "top_p", "min_p"):
            check(getattr(self, name), name, num_rows, dtype=torch.float32)
        check(self.top_k, "top_k", num_rows, dtype=torch.int32)
        check(self.keys, "keys", num_rows, dtype=torch.int64)


def choose(scores_RV: Tensor, choosing: Choosing, out_R: Tensor) -> None:
    """One token id for each row into ``out_R`` (int32 or int64), or :data:`NOT_FINITE`. Scores are float32.
    Raises ValueError for shapes that do not fit."""
    num_rows, vocab_size = scores_RV.shape
    check(scores_RV, "scores", None, None, dtype=torch.float32)
    check(out_R, "out", num_rows)
    choosing.check(num_rows)
    if num_rows:
        _choose[(num_rows,)](
            scores_RV,
            choosing.temperature,
            choosing.top_k,
            choosing.top_p,
            choosing.min_p,
            choosing.keys,
            out_R,
            vocab_size,
            scores_RV.stride(0),
            BLOCK=min(TOKENS, max(16, 1 << (vocab_size - 1).bit_length())),
            **options(scores_RV, num_warps=8),
        )


def choose_twin(scores_RV: Tensor, choosing: Choosing, out_R: Tensor) -> None:
    """The same in plain torch and numpy, with sorts."""
    for row, scores in enumerate(scores_RV.cpu().double()):
        peak = scores.max()
        if not torch.isfinite(peak):
            out_R[row] = NOT_FINITE
            continue
        temperature = choosing.temperature[row].item()
        if temperature == 0:
            out_R[row] = scores.argmax()
            continue
        scores = (scores.float() - peak.float()) / temperature
        kept = torch.ones_like(scores, dtype=torch.bool)
        if choosing.min_p[row] > 0:
            kept &= scores >= choosing.min_p[row].log().cpu()
        if 0 < choosing.top_k[row] < len(scores):
            kept &= scores >= scores.topk(int(choosing.top_k[row])).values[-1]
        if choosing.top_p[row] < 1:
            ranked = scores[kept].sort(descending=True).values
            mass = ranked.double().exp().cumsum(0)
            at = int(torch.searchsorted(mass, choosing.top_p[row].double().cpu() * mass[-1]))
            kept &= scores >= ranked[min(at, len(ranked) - 1)]
        noise = gumbel(int(choosing.keys[row]) & 0xFFFFFFFFFFFFFFFF, torch.arange(len(scores)).numpy())
        out_R[row] = (scores + torch.from_numpy(noise)).masked_fill(~kept, float("-inf")).argmax()


@jit
def _bits(score):
    """Grow as a score that is not positive falls."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _scaled(scores, token, vocab_size, peak, temperature):
    """The peak is at 0; what is outside the vocabulary at minus infinity."""
    score = tl.load(scores + token, mask=token < vocab_size, other=float("-inf"))
    return tl.math.div_rn(score - peak, temperature)


@jit
def _mass(scores, vocab_size, peak, temperature, least, BLOCK: tl.constexpr):
    """The sum of exp(score) over the tokens that score ``least`` or more."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        score = _scaled(scores, first + tl.arange(0, BLOCK), vocab_size, peak, temperature)
        total += tl.where(score >= least, tl.exp(score.to(tl.float64)), 0.0)
    return tl.sum(total, 0)


@jit
def _select(
    scores,
    vocab_size,
    peak,
    temperature,
    least,
    goal,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest score such that the tokens at or above it, and at or above ``least``, weigh ``goal`` together: one
    each, or exp(score) each."""
    chosen = tl.zeros([], tl.int32)
    below = tl.zeros([], tl.float64)
    bins = tl.arange(0, BINS)
    for step in range(8):
        shift = 28 - 4 * step
        weights = tl.zeros([BINS], tl.float64)
        for first in range(0, vocab_size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            score = _scaled(scores, token, vocab_size, peak, temperature)
            bits = _bits(score)
            is_here = (score >= least) & (token < vocab_size)
            if step > 0:
                is_here = is_here & ((bits >> (shift + 4)) == (chosen >> (shift + 4)))
            weight = tl.where(is_here, 1.0, 0.0).to(tl.float64)
            if not COUNTS:
                weight = weight * tl.exp(score.to(tl.float64))
            is_bin = ((bits >> shift) & 15)[None, :] == bins[:, None]
            weights += tl.sum(tl.where(is_bin, weight[None, :], 0.0), 1)
        reached = below + tl.cumsum(weights, 0)
        # The first bin that reaches the goal; rounding may leave the whole sum a hair below it.
        found = tl.minimum(tl.sum((reached < goal).to(tl.int32), 0), 15)
        below += tl.sum(tl.where(bins < found, weights, 0.0), 0)
        chosen = chosen | (found << shift)
    return -(chosen.to(tl.float32, bitcast=True))


@jit
def _round(bits, shift_1, mul_1, shift_2, mul_2, shift_3):
    bits = (bits ^ (bits >> shift_1)) * mul_1
    bits = (bits ^ (bits >> shift_2)) * mul_2
    return bits ^ (bits >> shift_3)


@jit
def _noise(key, token):
    """:func:`engine.sampler.gumbel`."""
    bits = token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + (key & 0xFFFFFFFF).to(tl.uint32)
    bits = _round(bits, 16, tl.full([], 0x21F0AAAD, tl.uint32), 15, tl.full([], 0x735A2D97, tl.uint32), 15)
    bits += ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits = _round(bits, 16, tl.full([], 0x85EBCA6B, tl.uint32), 13, tl.full([], 0xC2B2AE35, tl.uint32), 16)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@jit
def _choose(
    scores,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    out,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    go_ahead(CHAINED)
    scores += row * row_stride
    # The first of the best; NaN is not above anything, so it is counted.
    peak = tl.full([], float("-inf"), tl.float32)
    best = tl.zeros([], tl.int32)
    num_strange = 0
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.load(scores + token, mask=token < vocab_size, other=float("-inf"))
        num_strange += tl.sum(((score != score) | (score == float("inf"))).to(tl.int32), 0)
        highest = tl.max(score, 0)
        where = first + tl.min(tl.where(score == highest, tl.arange(0, BLOCK), BLOCK), 0)
        best = tl.where(highest > peak, where, best)
        peak = tl.maximum(peak, highest)
    temperature = tl.load(temperatures + row)
    chosen = best
    if (num_strange > 0) | (peak == float("-inf")):
        chosen = -1
    elif temperature > 0:
        least = tl.full([], float("-inf"), tl.float32)
        min_p = tl.load(min_ps + row)
        if min_p > 0:
            least = tl.log(min_p)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab_size):
            kth = _select(scores, vocab_size, peak, temperature, float("-inf"), top_k.to(tl.float64), True, BLOCK)
            least = tl.maximum(least, kth)
        top_p = tl.load(top_ps + row)
        if top_p < 1:
            goal = top_p.to(tl.float64) * _mass(scores, vocab_size, peak, temperature, least, BLOCK)
            least = tl.maximum(least, _select(scores, vocab_size, peak, temperature, least, goal, False, BLOCK))
        key = tl.load(keys + row)
        noisiest = tl.full([], float("-inf"), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            score = _scaled(scores, token, vocab_size, peak, temperature)
            noisy = tl.where(score >= least, score + _noise(key, token), float("-inf"))
            highest = tl.max(noisy, 0)
            where = first + tl.min(tl.where(noisy == highest, tl.arange(0, BLOCK), BLOCK), 0)
            chosen = tl.where(highest > noisiest, where, chosen)
            noisiest = tl.maximum(noisiest, highest)
    tl.store(out + row, chosen.to(out.dtype.element_ty))
