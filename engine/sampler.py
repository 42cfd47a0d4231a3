"""From scores to tokens. A row's token depends on its own scores, options and key, never on its neighbours.

Order: raw scores -> log probabilities (if asked for) -> what :mod:`engine.shaping` forbids and weighs -> greedy, or
temperature, min_p, top_k, top_p and one exact draw by Gumbel-max (the argmax of score + Gumbel noise is a softmax
sample).

The noise is a pure function of (seed, choice, absolute position, token id): :func:`sampling_key` and :func:`gumbel`
are integer mixing (SplitMix64, Steele et al. 2014) that a GPU kernel can repeat. So a draw does not depend on the
batch, the step or the worker it happens on, and only the candidates that are left need noise.

Ties are kept: ``top_k`` and ``top_p`` cut at a value, so equal scores stay together.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import InternalError, InvalidRequest, ServingError
from core.types import TokenLogprobs
from engine.sequence import Sequence
from engine.shaping import NEVER, shape

_DEAD_END = (
    "no token is left to choose: allowed_token_ids, bad_words, logit_bias, min_tokens or the grammar forbid them all"
)
_MASK = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST_CANDIDATES = 256


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
    raw_logprobs = torch.log_softmax(logits_RV[wanting], -1) if wanting else logits_RV[:0]
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
    logprobs = _token_logprobs(raw_logprobs, [tokens[row] for row in wanting], [sequences[row] for row in wanting])
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
    plain: list[int] = []
    tokens = [0] * len(sequences)
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.is_greedy:
            continue
        # The peak becomes 0, so that a tiny temperature drives the rest to minus infinity instead of overflowing.
        scores_RV[row].sub_(scores_RV[row].amax()).div_(sampling.temperature)
        if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            tokens[row] = _draw_filtered(scores_RV[row], sequence)
        else:
            plain.append(row)
    if plain:
        keys = torch.tensor([_key_of(sequences[row]) for row in plain])
        scores_RV[plain] += gumbel(keys, torch.arange(scores_RV.shape[-1]))
    # numpy's argmax is many times faster than torch's on CPU and always takes the first of equals.
    best = scores_RV.numpy().argmax(-1).tolist()
    for row, sequence in enumerate(sequences):
        if sequence.sampling.is_greedy:
            tokens[row] = best[row]
    for row in plain:
        tokens[row] = best[row]
    return tokens


def _draw_filtered(scores_V: Tensor, sequence: Sequence) -> int:
    sampling = sequence.sampling
    least = torch.tensor(sampling.min_p).log().item() if sampling.min_p > 0.0 else NEVER
    if 0 < sampling.top_k < scores_V.shape[0]:
        least = max(least, scores_V.topk(sampling.top_k).values[-1].item())
    if sampling.top_p < 1.0:
        least = max(least, _nucleus(scores_V, least, sampling.top_p))
    candidates = (scores_V >= least).nonzero().view(-1)
    noisy = scores_V[candidates] + gumbel(torch.tensor([_key_of(sequence)]), candidates)[0]
    return int(candidates[int(noisy.numpy().argmax())])


def _nucleus(scores_V: Tensor, least: float, top_p: float) -> float:
    """The score down to which the most likely tokens hold ``top_p`` of the mass of those not below ``least``."""
    weights = scores_V.exp()
    goal = top_p * weights.masked_fill_(scores_V < least, 0.0).sum().item()
    num_candidates = min(_FIRST_CANDIDATES, len(weights))
    while True:  # a running sum does not depend on how many follow, so neither does the cut
        top = weights.topk(num_candidates)
        reached = (top.values.cumsum(-1) >= goal).nonzero()
        if len(reached):
            return scores_V[top.indices[reached[0, 0]]].item()
        if num_candidates == len(weights):
            return least  # rounding: the whole sum stays a hair below the goal
        num_candidates = min(8 * num_candidates, len(weights))


# -- the generator ----------------------------------------------------------------------------------------------------


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def sampling_key(seed: int, choice: int, position: int) -> int:
    """64 bits (as a signed number) that stand for one draw: the token at absolute ``position`` of a choice."""
    key = 0
    for part in (seed, choice, position):
        key = _mix(key + _GAMMA * ((part & _MASK) + 1))
    return key - (1 << 64) if key >> 63 else key


def gumbel(keys_R: Tensor, ids_V: Tensor) -> Tensor:
    """Standard Gumbel noise ``[R, V]`` in float32: -log(-log(u)) with u from the top 23 bits of mix(key + gamma (id +
    1)).

    23 bits, because 24 and a half would round u to 1 in float32. Integers wrap around as in C.
    """
    bits = _signed(_GAMMA) * (ids_V + 1)[None, :] + keys_R[:, None]
    bits.bitwise_xor_((bits >> 30) & ((1 << 34) - 1)).mul_(_signed(_MIX_1))
    bits.bitwise_xor_((bits >> 27) & ((1 << 37) - 1)).mul_(_signed(_MIX_2))
    bits.bitwise_xor_((bits >> 31) & ((1 << 33) - 1))
    uniform = ((bits >> 41) & ((1 << 23) - 1)).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def _key_of(sequence: Sequence) -> int:
    return sampling_key(sequence.sampling.seed, sequence.key.choice, len(sequence.tokens))


# -- log probabilities ------------------------------------------------------------------------------------------------


def _token_logprobs(logprobs_RV: Tensor, tokens: Seq[int], sequences: Seq[Sequence]) -> list[TokenLogprobs]:
    return token_logprobs(logprobs_RV, tokens, [sequence.sampling.logprobs or 0 for sequence in sequences])


def token_logprobs(logprobs_RV: Tensor, tokens: Seq[int], num_top: Seq[int]) -> list[TokenLogprobs]:
    """For each row its token's log probability and rank, and the ``num_top`` most likely ones."""
    if not tokens:
        return []
    chosen_R1 = logprobs_RV.gather(-1, torch.tensor(tokens)[:, None])
    ranks = ((logprobs_RV > chosen_R1).sum(-1) + 1).tolist()
    chosen = chosen_R1[:, 0].tolist()
    most = logprobs_RV.topk(min(max(num_top), logprobs_RV.shape[-1]))
    ids, values = most.indices.tolist(), most.values.tolist()
    return [
        TokenLogprobs(logprob=chosen[row], rank=ranks[row], top=_ordered(ids[row][:count], values[row][:count]))
        for row, count in enumerate(num_top)
    ]


def _ordered(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))


def _is_finite(value: float) -> bool:
    return value - value == 0.0
