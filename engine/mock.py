"""Mock execution: the model's forward pass replaced by a cost table, everything else of the worker real.

A step waits as long as the table says. Its KV is real but small: for each token two words that depend on the token and
its position. The next token is a function of *every* word of the context, read from the blocks of the sequence's table
as attention would: so a block that was moved wrongly, shared wrongly or written over changes the answer, and equal
answers in ``split``, ``local``, with prefix hits, after a preemption or a retry mean what they mean with a model.

Words are ``mix(position, token)`` of SplitMix64's finaliser (Steele et al. 2014); a context is their sum mod 2^64 and
its length. Greedy tokens are drawn from that alone, the others also from (seed, choice, position). Answers are words of
the tokenizer, and end where a limit or a grammar ends them.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.costs import StepCosts
from core.kv import KVFormat
from engine.execution import Computed
from engine.kv_cache import KVCache, KVShape
from engine.prompt_scores import score_prompts
from engine.sampler import Sampled, gumbel, sample, sampling_key
from engine.scheduler import Chunk, work_of
from engine.sequence import Sequence
from modelfiles.model import ModelFiles

MOCK = "mock"
"""Compute dtype and quantisation of a mock worker's format: it pairs with no worker that runs a model."""
_SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}
"""Of its KV: K and V of a token are one 64-bit word each."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GAMMA = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_VALUE_SALT = np.uint64(0xD1B54A32D192ED03)
_FAR = -100.0
"""Score of what is never drawn unless a grammar leaves nothing else."""
_MAX_LAG_S = 0.25
"""A step that was late by more does not hurry those behind it for what is beyond."""
_PAUSE_S = 0.002
"""Steps further apart than this do not follow each other: the time between them was idle, and not late."""

Words = npt.NDArray[np.uint64]


def as_mock(kv_format: KVFormat, shape: KVShape) -> tuple[KVFormat, KVShape]:
    """Format and KV of a mock worker in the place of a real one with these."""
    small = KVShape(block_size=shape.block_size, **_SHAPE)  # type: ignore[arg-type]
    return replace(
        kv_format,
        compute_dtype=MOCK,
        kv_dtype=small.dtype,
        quantisation=MOCK,
        num_layers=small.num_layers,
        num_kv_heads=small.num_kv_heads,
        head_dim=small.head_dim,
    ), small


class Pace:
    """Waits, without spinning, until steps have taken as long as they should. A wait that ends late, work that took
    longer and the time between two steps that follow each other are made good by the next steps: many together take
    what they should."""

    def __init__(
        self, *, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._ended_at = now()
        self._lag_s = 0.0

    def start(self) -> float:
        """The step begins. Returns what :meth:`finish` wants."""
        now = self._now()
        gap_s = now - self._ended_at
        if gap_s <= _PAUSE_S:
            return self._ended_at - self._lag_s
        return now - max(0.0, self._lag_s - gap_s)

    def finish(self, started_at: float, seconds: float) -> None:
        due = started_at + seconds
        remaining = due - self._now()
        if remaining > 0:
            self._sleep(remaining)
        self._ended_at = self._now()
        self._lag_s = min(max(self._ended_at - due, 0.0), _MAX_LAG_S)


class MockExecution:
    """An :class:`~engine.execution.Execution` without weights."""

    looks_ahead = False

    def __init__(self, costs: StepCosts, cache: KVCache, files: ModelFiles, *, pace: Pace | None = None) -> None:
        self.costs = costs
        """May be replaced at any time, from any thread: from the next step on."""
        self.pace = pace or Pace()
        """May be replaced before the first step."""
        self._block_size = cache.geometry.block_size
        self._words: Words = cache.array.view(np.uint64).reshape(-1, 2, self._block_size)
        """[block, k/v, slot]"""
        self._vocab_size = files.config.vocab_size
        ordinary = files.tokenizer().ordinary_texts
        self._ids = np.array(
            [one for one, text in ordinary.items() if text and one not in files.config.eos_token_ids], np.int64
        )
        assert len(self._ids), "a tokenizer has words"

    def run(self, chunks: Seq[Chunk]) -> Computed:
        started_at = self.pace.start()
        for chunk in chunks:
            self._write(chunk)
        self._score_prompts(chunks)
        sampled = [chunk.sequence for chunk in chunks if chunk.is_sampled]
        keys = [self._context(sequence.block_table, len(sequence.tokens)) for sequence in sampled]
        outcome = Computed(chunks=tuple(chunks), sampled=self._draw(sampled, keys))
        self.pace.finish(started_at, self.costs.step_s(work_of(chunks)))
        return outcome

    def settle(self, sequence: Sequence) -> None:
        """A step has ended when :meth:`run` returns."""

    # -- KV -----------------------------------------------------------------------------------------------------------

    def _write(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.end)
        first = chunk.start // self._block_size
        table = np.array(chunk.sequence.block_table[first : -(-chunk.end // self._block_size)])
        blocks, slots = table[positions // self._block_size - first], positions % self._block_size
        words = _mix(positions.astype(np.uint64) << np.uint64(32) | _unsigned(chunk))
        self._words[blocks, 0, slots] = words
        self._words[blocks, 1, slots] = _mix(words ^ _VALUE_SALT)

    def _context(self, block_table: Seq[int], num_tokens: int) -> int:
        """64 bits that stand for the first ``num_tokens`` tokens, as their blocks have them."""
        num_complete, num_slots = divmod(num_tokens, self._block_size)
        total = int(self._words[np.array(block_table[:num_complete], np.int64)].sum(dtype=np.uint64))
        if num_slots:
            total += int(self._words[block_table[num_complete], :, :num_slots].sum(dtype=np.uint64))
        return (total + _GAMMA * num_tokens) & _WORD

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _draw(self, sequences: Seq[Sequence], contexts: Seq[int]) -> tuple[Sampled, ...]:
        """Plain requests have their token at once; what shapes or scores an answer has made-up scores and the real
        sampler."""
        drawn = [Sampled(token_id=self._token(*each)) for each in zip(sequences, contexts, strict=True)]
        shaped = [row for row, sequence in enumerate(sequences) if not _is_plain(sequence)]
        if shaped:
            scores_RV = self._scores(torch.tensor([_signed(contexts[row]) for row in shaped]))
            for row, each in zip(shaped, sample(scores_RV, [sequences[row] for row in shaped]), strict=True):
                drawn[row] = each
        return tuple(drawn)

    def _token(self, sequence: Sequence, context: int) -> int:
        sampling = sequence.sampling
        seed = 0 if sampling.is_greedy else sampling.seed
        choice = 0 if sampling.is_greedy else sequence.key.choice
        return int(self._ids[sampling_key(context ^ seed, choice, len(sequence.tokens)) % len(self._ids)])

    def _scores(self, contexts_R: Tensor) -> Tensor:
        """Made-up scores ``[R, V]`` that depend on the context alone."""
        scores_RV = np.full((len(contexts_R), self._vocab_size), _FAR, np.float32)
        for row, context in enumerate(contexts_R.tolist()):
            scores_RV[row, self._ids] = gumbel(sampling_key(context & _WORD, 0, 0), self._ids)
        return torch.from_numpy(scores_RV)

    def _score_prompts(self, chunks: Seq[Chunk]) -> None:
        if all(chunk.sequence.prompt_scores is None for chunk in chunks):
            return
        contexts = [
            _signed(self._context(chunk.sequence.block_table, position + 1))
            for chunk in chunks
            for position in range(chunk.start, chunk.end)
        ]
        score_prompts(self._scores, torch.tensor(contexts), chunks, 1)


def _is_plain(sequence: Sequence) -> bool:
    """Nothing of the request but its temperature and seed says which token comes."""
    sampling = sequence.sampling
    return (
        sequence.grammar is None
        and sampling.logprobs is None
        and not (sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words)
    )


def _unsigned(chunk: Chunk) -> Words:
    return np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.uint64)


def _mix(values: Words) -> Words:
    values = (values ^ values >> np.uint64(30)) * _MIX[0]
    values = (values ^ values >> np.uint64(27)) * _MIX[1]
    mixed: Words = values ^ values >> np.uint64(31)
    return mixed


def _signed(context: int) -> int:
    """The same bits as torch has them."""
    return context - (1 << 64) if context >> 63 else context
