"""One worker's mutable progress on one choice of a request.

The only arithmetic is "has" against "computed": ``tokens`` are those the sequence has (prompt, accepted in earlier
attempts, generated), ``num_computed`` of them have their KV in ``block_table``. Whatever lies between is *pending*;
when nothing would be left pending, the step samples the next token. State machine (changed only by
:mod:`engine.scheduler` and :mod:`engine.engine`)::

    NEW --add--> WAITING --scheduled--> RUNNING --a stop rule or an error----> FINISHED
                    ^                    |   |                                    ^
                    +----preempted-------+   +--len(tokens) = pause_at--> PAUSED --+ removed
                                             `--a stop rule, if kept--------^
                                                                            |
    any state but FINISHED --removed (abort, deadline)--> FINISHED          +--detached--> NEW

NEW and PAUSED sequences hold their blocks but take part in no step. Deadlines belong to the worker, which removes a
sequence whose time is up, whatever its state.

Ownership of blocks: ``block_table`` and ``reservation`` belong to whoever holds the sequence. ``Engine.add`` takes
them over; finishing or removing frees them; ``Engine.detach`` hands them back. A block may be in the tables of several
sequences (prefix hits, forks); whoever writes to such a block gets a copy first (:mod:`engine.block_table`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from core.ids import BlockHash, RequestId
from core.types import SamplingParams, TokenLogprobs
from engine.block_pool import Reservation
from engine.grammar import GrammarState
from engine.token_counts import TokenCounts


class SequenceKey(NamedTuple):
    """Names a sequence on its worker."""

    request_id: RequestId
    attempt: int
    choice: int


class SequenceState(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Progress. Identity is the object; ``key`` finds it."""

    key: SequenceKey
    sampling: SamplingParams
    tokens: list[int]
    """Prompt, accepted and generated tokens."""
    num_prompt_tokens: int
    """Of the *original* prompt: penalties, min and max tokens, usage and generated indices count from its end."""
    pause_at: int | None = None
    """Park the sequence when it has this many tokens."""
    is_kept: bool = False
    """A stop rule pauses it: other choices are still to be forked from its blocks."""
    num_computed: int = 0
    """Tokens whose KV is in the blocks. An arrival with KV brings blocks for them."""
    block_table: list[int] = field(default_factory=list)
    reservation: Reservation | None = None
    priority: int = 0
    """Lower is served first, where the scheduler's policy is ``priority``."""
    salt: str = ""
    """Of the block hashes: sequences of different tenants share nothing."""
    has_unverified_kv: bool = False
    """It arrived with KV that nobody vouches for: used, but never shared."""
    state: SequenceState = SequenceState.NEW
    arrival: int = -1
    """Order of arrival at the scheduler: the lowest is the oldest. Kept over preemptions."""
    num_prompt_computed: int = 0
    """Tokens of the original prompt that *this* worker computed (again after a preemption). 0 in ``split`` mode at D.
    """
    num_tokens_computed: int = 0
    """Tokens of any kind that this worker computed."""
    num_cached: int = 0
    """Tokens of the original prompt whose KV this worker held already when the sequence first started."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Of its first complete blocks, as far as they were needed."""
    has_foreign_tail: bool = False
    """It was forked: behind its tokens its last block holds what another sequence wrote there."""
    num_published: int = 0
    """Its first so many blocks are known to the prefix cache."""
    is_leased_early: bool = False
    """Its complete blocks are leased as soon as they are computed (:attr:`engine.engine.StepResult.leased`)."""
    num_leased: int = 0
    """Its first so many blocks were leased that way."""
    num_preemptions: int = 0
    grammar: GrammarState | None = None
    """Started from the compiled ``sampling.grammar`` by whoever makes the sequence."""
    counts: TokenCounts | None = None
    """The sampler's, where penalties need them."""
    prompt_scores: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, while they are asked for and not yet told."""
    first_step_at: float | None = None
    """``time.monotonic`` at the start of the first step that ran it here."""

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Generated tokens, those of earlier attempts included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def num_final_tokens(self) -> int:
        """Tokens that will need KV at most: all but the last one before it ends or pauses."""
        final = self.num_prompt_tokens + self.sampling.max_tokens
        return (final if self.pause_at is None else min(final, self.pause_at)) - 1

    @property
    def may_use_cache(self) -> bool:
        """Scores of the prompt's tokens can only be had by computing them."""
        return self.sampling.prompt_logprobs is None

    def mark_computed(self, num_tokens: int) -> int:
        """``num_tokens`` more tokens have their KV; returns how many of them are of the original prompt."""
        start, end = self.num_computed, self.num_computed + num_tokens
        assert end <= len(self.tokens), "computed more than there is"
        num_prompt = max(0, min(end, self.num_prompt_tokens) - start)
        self.num_computed = end
        self.num_tokens_computed += num_tokens
        self.num_prompt_computed += num_prompt
        return num_prompt
