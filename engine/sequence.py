"""One worker's mutable progress on one choice of a request.

The only arithmetic is "has" against "computed": ``tokens`` are those the sequence has (prompt, accepted in earlier
attempts, generated), ``num_computed`` of them have their KV in ``block_table``. Whatever lies between is *pending*;
when nothing would be left pending, the step samples the next token. State machine (changed only by
:mod:`engine.scheduler` and :mod:`engine.engine`)::

    NEW --add--> WAITING --scheduled--> RUNNING --a stop rule or an error----> FINISHED
                    ^                    |   |                                    ^
                    +----preempted-------+   +--len(tokens) = pause_at--> PAUSED --+ removed
                                                                            |
    any state but FINISHED --removed (abort, deadline)--> FINISHED          +--detached--> NEW

NEW and PAUSED sequences hold their blocks but take part in no step. Deadlines belong to the worker, which removes a
sequence whose time is up, whatever its state.

Ownership of blocks: ``block_table`` and ``reservation`` belong to whoever holds the sequence. ``Engine.add`` takes
them over; finishing or removing frees them; ``Engine.detach`` hands them back.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from core.ids import RequestId
from core.types import SamplingParams
from engine.block_pool import Reservation


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
    num_computed: int = 0
    """Tokens whose KV is in the blocks. An arrival with KV brings blocks for them."""
    block_table: list[int] = field(default_factory=list)
    reservation: Reservation | None = None
    state: SequenceState = SequenceState.NEW
    arrival: int = -1
    """Order of arrival at the scheduler: the lowest is the oldest. Kept over preemptions."""
    num_prompt_computed: int = 0
    """Tokens of the original prompt that *this* worker computed (again after a preemption). 0 in ``split`` mode at D.
    """
    num_tokens_computed: int = 0
    """Tokens of any kind that this worker computed."""
    num_cached: int = 0
    """Prompt tokens whose KV this worker held already."""
    num_preemptions: int = 0
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
    def can_grow(self) -> bool:
        """More blocks than its present tokens need may be wanted later."""
        return self.pause_at is None or len(self.tokens) + 1 < self.pause_at

    def mark_computed(self, num_tokens: int) -> int:
        """``num_tokens`` more tokens have their KV; returns how many of them are of the original prompt."""
        start, end = self.num_computed, self.num_computed + num_tokens
        assert end <= len(self.tokens), "computed more than there is"
        num_prompt = max(0, min(end, self.num_prompt_tokens) - start)
        self.num_computed = end
        self.num_tokens_computed += num_tokens
        self.num_prompt_computed += num_prompt
        return num_prompt
