"""What things cost: seconds of a prefill, of a step, of a hand-off, and what a prompt between answers does to them.

One linear law describes every step of every worker, whatever its role::

    step = fixed + decode_row * rows + decode_position * (tokens they attend to)
                 + prompt_token * (tokens of prompts) + prompt_pair * (pairs of tokens in their attention)

so a prompt of L tokens costs a + bL + cL^2, and what a prefill worker measures says what a decode worker's own prefill
would cost, as long as that has measured none. A hand-off costs ``fixed + byte * num_bytes``, where the bytes are those
that had not moved when the prompt was computed.

Workers measure (heartbeats carry samples of single steps and hand-offs, without anybody's waiting),
:mod:`router.cost_book` learns, :class:`Costs` is a frozen copy for the policy. Every number belongs to an incarnation.
One that has measured little is taken to be like its pool, a pool like its model, and a model that nobody has measured
like the defaults here, which are only shapes: the first observations scale them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.costs import StepWork
from core.ids import Incarnation, WorkerId
from core.types import WorkerAddress

WorkerKey = tuple[WorkerId, Incarnation]
PairKey = tuple[WorkerKey, WorkerKey]
"""(prefill, decode)."""

UNLIMITED = 1 << 30
"""Stands for "no limit" of tokens in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """The law of one worker's steps, in seconds for each unit, and the limits that cut prompts into steps."""

    fixed_s: float = 5e-3
    decode_row_s: float = 2e-4
    decode_position_s: float = 1e-7
    prompt_token_s: float = 1e-4
    prompt_pair_s: float = 1e-8
    max_step_tokens: int = UNLIMITED
    max_mixed_tokens: int = UNLIMITED

    def step_s(self, work: StepWork) -> float:
        answers_s = self.answers_s(work.num_decode_rows, work.num_decode_positions)
        return answers_s + self.prompt_s(work.num_prompt_tokens, work.num_prompt_pairs)

    def answers_s(self, num_rows: int, num_positions: int) -> float:
        """A step of answers alone, which attend to ``num_positions`` tokens, all together."""
        return self.fixed_s + self.decode_row_s * num_rows + self.decode_position_s * num_positions

    def prompt_s(self, num_tokens: int, num_pairs: int) -> float:
        """What a prompt adds to the steps that it is computed in."""
        return self.prompt_token_s * num_tokens + self.prompt_pair_s * num_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLaw:
    fixed_s: float = 5e-3
    byte_s: float = 1e-9

    def handoff_s(self, num_bytes: float) -> float:
        return self.fixed_s + self.byte_s * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Everything learned so far, for the policy. Who was never heard of costs the default."""

    steps: Mapping[WorkerKey, StepLaw] = field(default_factory=dict)
    handoffs: Mapping[PairKey, HandoffLaw] = field(default_factory=dict)
    handoffs_of: Mapping[WorkerKey, HandoffLaw] = field(default_factory=dict)
    """By decode worker: of all pairs of its model, for a pair that has measured nothing."""
    measured: frozenset[str] = frozenset()
    """Models of which prompts have been timed: for others nothing here is more than a guess."""

    def of(self, worker: WorkerAddress) -> StepLaw:
        return self.steps.get((worker.worker_id, worker.incarnation), _DEFAULT_STEP)

    def prefill_s(self, worker: WorkerAddress, num_new_tokens: int, num_context_tokens: int = 0) -> float:
        """To compute ``num_new_tokens`` behind ``num_context_tokens`` that are there, in steps of their own."""
        cost = self.of(worker)
        num_steps = -(-num_new_tokens // cost.max_step_tokens)
        return num_steps * cost.fixed_s + cost.prompt_s(num_new_tokens, num_pairs(num_new_tokens, num_context_tokens))

    def step_s(self, worker: WorkerAddress, num_rows: int, num_context_tokens: int) -> float:
        """One step of ``num_rows`` answers that attend to ``num_context_tokens`` tokens, all together."""
        return self.of(worker).answers_s(num_rows, num_context_tokens)

    def handoff_s(self, prefill: WorkerAddress, decode: WorkerAddress, num_bytes: int) -> float:
        """From the end of the prefill until D can run; ``num_bytes`` have not moved by then."""
        p, d = (prefill.worker_id, prefill.incarnation), (decode.worker_id, decode.incarnation)
        law = self.handoffs.get((p, d)) or self.usual_handoff(decode)
        return law.handoff_s(num_bytes)

    def usual_handoff(self, decode: WorkerAddress) -> HandoffLaw:
        """From a prefill worker of which D has measured nothing."""
        return self.handoffs_of.get((decode.worker_id, decode.incarnation), _DEFAULT_HANDOFF)

    def local_prefill_s(
        self,
        worker: WorkerAddress,
        num_new_tokens: int,
        num_context_tokens: int = 0,
        *,
        num_rows: int = 0,
        num_decode_positions: int = 0,
    ) -> float:
        """As ``prefill_s``, in steps in which ``num_rows`` answers advance too: a little of the prompt in each."""
        if num_rows <= 0:
            return self.prefill_s(worker, num_new_tokens, num_context_tokens)
        cost = self.of(worker)
        num_steps = -(-num_new_tokens // min(cost.max_mixed_tokens, cost.max_step_tokens))
        prompt_s = cost.prompt_s(num_new_tokens, num_pairs(num_new_tokens, num_context_tokens))
        return num_steps * cost.answers_s(num_rows, num_decode_positions) + prompt_s

    def itl_harm_s(
        self, worker: WorkerAddress, num_new_tokens: int, num_context_tokens: int = 0, *, num_rows: int
    ) -> float:
        """How much later the next tokens of ``num_rows`` running answers come, all together, for a prompt that is
        computed between them."""
        pairs = num_pairs(num_new_tokens, num_context_tokens)
        return num_rows * self.of(worker).prompt_s(num_new_tokens, pairs)


def num_pairs(num_new_tokens: int, num_context_tokens: int) -> int:
    """Pairs in the attention of new tokens behind a context: each attends to all before it and to itself."""
    return num_new_tokens * num_context_tokens + num_new_tokens * (num_new_tokens + 1) // 2


_DEFAULT_STEP = StepLaw()
_DEFAULT_HANDOFF = HandoffLaw()
