"""Options that change scores before a token is chosen: forbidden tokens, biases, penalties. In place, for all rows at
once; a row without an option is not touched.

Order: grammar, allowed ids, bad words and minimum length, bias, penalties. Forbidden tokens are at minus infinity and
stay there, whatever follows.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.errors import ServingError
from engine.sequence import Sequence
from engine.stopping import stop_token_ids
from engine.token_counts import TokenCounts

NEVER = float("-inf")


@dataclass(slots=True)
class Shaped:
    """What was done: rows whose scores changed, rows whose sequence failed."""

    rows: set[int] = field(default_factory=set)
    errors: dict[int, ServingError] = field(default_factory=dict)


def shape(scores_RV: Tensor, sequences: Seq[Sequence]) -> Shaped:
    shaped = Shaped()
    for apply in (_grammar, _allowed, _banned, _bias, _penalties):
        apply(scores_RV, sequences, shaped)
    return shaped


def _rows(sequences: Seq[Sequence], wants: Callable[[Sequence], object]) -> list[int]:
    return [row for row, sequence in enumerate(sequences) if wants(sequence)]


def _grammar(scores_RV: Tensor, sequences: Seq[Sequence], shaped: Shaped) -> None:
    rows = _rows(sequences, lambda sequence: sequence.grammar is not None)
    if not rows:
        return
    vocab_size = scores_RV.shape[-1]
    bits_RW = np.full((len(rows), -(-vocab_size // 32)), -1, np.int32)
    for index, row in enumerate(rows):
        sequence = sequences[row]
        assert sequence.grammar is not None
        try:
            sequence.grammar.follow(sequence.tokens, sequence.num_prompt_tokens)
            sequence.grammar.fill(bits_RW, index)
        except ServingError as error:
            shaped.errors[row] = error
    forbidden_RV = np.unpackbits(~bits_RW.view(np.uint8), axis=-1, bitorder="little", count=vocab_size)
    is_forbidden_RV = torch.from_numpy(forbidden_RV.view(np.bool_))
    if len(rows) == len(sequences):
        scores_RV.masked_fill_(is_forbidden_RV, NEVER)
    else:
        scores_RV[rows] = scores_RV[rows].masked_fill_(is_forbidden_RV, NEVER)
    shaped.rows.update(rows)


def _allowed(scores_RV: Tensor, sequences: Seq[Sequence], shaped: Shaped) -> None:
    rows = _rows(sequences, lambda sequence: sequence.sampling.allowed_token_ids)
    if not rows:
        return
    at = _flat([(row, sequences[row].sampling.allowed_token_ids) for row in rows])
    kept = scores_RV[at]
    scores_RV[rows] = NEVER
    scores_RV[at] = kept
    shaped.rows.update(rows)


def _banned(scores_RV: Tensor, sequences: Seq[Sequence], shaped: Shaped) -> None:
    banned: list[tuple[int, Seq[int]]] = []
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.bad_words:
            banned.append((row, _ends_of_bad_words(sequence)))
        if sequence.num_generated < sampling.min_tokens:
            banned.append((row, stop_token_ids(sampling)))
    banned = [one for one in banned if one[1]]
    if banned:
        scores_RV[_flat(banned)] = NEVER
        shaped.rows.update(row for row, _ in banned)


def _ends_of_bad_words(sequence: Sequence) -> list[int]:
    """Last tokens of the bad words whose other tokens have just been generated."""
    words = sequence.sampling.bad_words
    tail = tuple(sequence.tokens[max(sequence.num_prompt_tokens, len(sequence.tokens) - max(map(len, words)) + 1) :])
    return [word[-1] for word in words if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]]


def _bias(scores_RV: Tensor, sequences: Seq[Sequence], shaped: Shaped) -> None:
    rows = _rows(sequences, lambda sequence: sequence.sampling.logit_bias)
    if not rows:
        return
    pairs = [(row, [token_id for token_id, _ in sequences[row].sampling.logit_bias]) for row in rows]
    biases = [bias for row in rows for _, bias in sequences[row].sampling.logit_bias]
    scores_RV.index_put_(_flat(pairs), torch.tensor(biases, dtype=scores_RV.dtype), accumulate=True)
    shaped.rows.update(rows)


def _penalties(scores_RV: Tensor, sequences: Seq[Sequence], shaped: Shaped) -> None:
    """Repetition counts prompt and answer; frequency and presence count the answer (from the original prompt's end)."""
    rows = _rows(
        sequences,
        lambda sequence: (
            sequence.sampling.repetition_penalty != 1.0
            or (
                (sequence.sampling.frequency_penalty or sequence.sampling.presence_penalty)
                and sequence.num_generated > 0
            )
        ),
    )
    if not rows:
        return
    counted = [_counts(sequences[row]) for row in rows]
    sizes = [len(one.ids) for one in counted]
    at = (torch.from_numpy(np.repeat(rows, sizes)), torch.from_numpy(np.concatenate([one.ids for one in counted])))
    options = [sequences[row].sampling for row in rows]
    subtracted = np.concatenate(
        [
            option.frequency_penalty * one.counts + option.presence_penalty * (one.counts > 0)
            for option, one in zip(options, counted, strict=True)
        ]
    )
    factors = torch.from_numpy(np.repeat([option.repetition_penalty for option in options], sizes).astype(np.float32))
    seen = scores_RV[at]
    seen = torch.where(seen > 0, seen / factors, seen * factors)
    scores_RV[at] = seen - torch.from_numpy(subtracted.astype(np.float32))
    shaped.rows.update(rows)


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        with_prompt = sequence.sampling.repetition_penalty != 1.0
        sequence.counts = TokenCounts(sequence.num_prompt_tokens, with_prompt=with_prompt)
    sequence.counts.catch_up(sequence.tokens)
    return sequence.counts


def _flat(ids_of_rows: Seq[tuple[int, Seq[int]]]) -> tuple[Tensor, Tensor]:
    """Row and token id of every entry, for one gather or scatter."""
    rows = [row for row, ids in ids_of_rows for _ in ids]
    return torch.tensor(rows), torch.tensor([token_id for _, ids in ids_of_rows for token_id in ids])
