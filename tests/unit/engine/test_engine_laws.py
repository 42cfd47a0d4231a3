"""Laws 1, 2 and 3 under anything a worker may do between two steps: add, fork, abort, retry, lease, detach, bring back.

Every token of every choice is held against the answer that the same request gets alone, bit by bit: raw scores, log
probabilities, finish reason. Most prompts begin alike, so most blocks are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.costs import StepCosts
from core.errors import OutOfBlocks
from core.types import TokenLogprobs
from engine.block_pool import Reservation
from engine.engine import SequenceOutput
from engine.sequence import Sequence, SequenceKey, SequenceState
from tests.support.engine_runs import recording
from tests.support.random_requests import OPTION_NAMES, Answer, Asked, Model, requests, score_bytes
from worker import choices

MODELS: Mapping[str, Callable[[], Model]] = {
    "float32": lambda: Model("float32"),
    "int8": lambda: Model("int8"),
    "float32, window and qk-norm": lambda: Model(
        "float32", architecture="qwen3", sliding_window=9, sliding_layers=(1,)
    ),
    "int8, window and qk-norm": lambda: Model("int8", architecture="qwen3", sliding_window=9, sliding_layers=(1,)),
    "mock": lambda: Model("float32", costs=StepCosts.linear(fixed_s=0.0, prompt_token_s=0.0, decode_row_s=0.0)),
}
CROWD = [
    Asked(prompt=tuple(range(3, 9 + index)), options=(("max_tokens", 30), ("seed", index), ("temperature", 1.0)))
    for index in range(6)
]
"""Answers that grow long side by side, so that a small pool runs out."""
MOST_ALIVE = 12
"""Three times as many as run at once."""
HAPPENED = frozenset(
    {"hit", "preempted", "in chunks", "in company", "forked", "retried", "aborted", "brought back", "several choices"}
)
"""What must have been met for a run to prove anything."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One choice on its way through the engine."""

    sequence: Sequence
    asked: Asked
    answer: Answer
    num_told: int
    """Tokens accepted, here or in an attempt before."""
    prompt_scores: tuple[TokenLogprobs, ...]
    """Still to be told."""
    others: tuple[Sequence, ...] = ()
    """Choices that it leads: they are forked from it when it has its first token."""


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, model: Model, seen: Counter[str]) -> None:
        super().__init__()
        self.model, self.seen = model, seen
        self.alive: dict[SequenceKey, Life] = {}
        self.detached: list[Life] = []
        self.leased: list[list[int]] = []
        self.custody: list[list[int]] = []
        self.asked: list[Asked] = []

    @initialize(
        block_size=st.sampled_from((1, 3, 4, 16)),
        num_slots=st.sampled_from((60, 90, 250)),
        max_step_tokens=st.sampled_from((8, 30, 256)),
        max_mixed_tokens=st.sampled_from((6, 40, 256)),
        projected_tokens=st.sampled_from((1, 1, 16)),
        policy=st.sampled_from(("fcfs", "priority")),
        prefix_cache=st.sampled_from((True, True, True, False)),
    )
    def open(self, block_size: int, num_slots: int, **config: Any) -> None:
        num_blocks = -(-num_slots // block_size)
        self.engine = self.model.engine(block_size=block_size, num_blocks=num_blocks, max_sequences=4, **config)
        self.max_step_tokens: int = config["max_step_tokens"]

    # -- what a worker does -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.alive) < MOST_ALIVE)
    @rule(
        asked=requests,
        promised=st.integers(0, 6),
        pause=st.sampled_from((None, 1, 4)),
        priority=st.integers(0, 2),
    )
    def add(self, asked: Asked, promised: int, pause: int | None, priority: int) -> None:
        reservation: Reservation | None = None
        try:
            reservation = self.engine.pool.reserve(promised) if promised else None
        except OutOfBlocks:
            return
        self.asked.append(asked)
        pause_at = None if pause is None else len(asked.prompt) + pause
        sequence = asked.sequence(self.engine, pause_at=pause_at, reservation=reservation, priority=priority)
        self._begin(sequence, asked)
        self.seen["in chunks"] += len(asked.prompt) > self.max_step_tokens

    @precondition(lambda self: len(self.alive) < MOST_ALIVE)
    @rule(places=st.sets(st.integers(0, len(CROWD) - 1), min_size=3, max_size=4))
    def add_several(self, places: set[int]) -> None:
        for place in sorted(places):
            self._begin(CROWD[place].sequence(self.engine), CROWD[place])

    @precondition(lambda self: self.asked and len(self.alive) < MOST_ALIVE)
    @rule(data=st.data(), salt=st.sampled_from(("", "", "other")))
    def ask_again(self, data: st.DataObject, salt: str) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        self._begin(asked.sequence(self.engine, salt=salt, choice=data.draw(st.integers(0, 1))), asked)

    @precondition(lambda self: len(self.alive) < MOST_ALIVE)
    @rule(asked=requests, num_others=st.integers(1, 3), salt=st.sampled_from(("", "other")))
    def add_choices(self, asked: Asked, num_others: int, salt: str) -> None:
        """n > 1: one choice computes the prompt, the others share it."""
        length = len(asked.prompt)
        others = tuple(
            asked.sequence(self.engine, choice=choice, num_computed=length - 1, salt=salt)
            for choice in range(1, num_others + 1)
        )
        leader = asked.sequence(self.engine, pause_at=length + 1, is_kept=True, salt=salt)
        self._begin(leader, asked)
        self.alive[leader.key].others = others

    @precondition(lambda self: any(each.sequence.num_computed for each in self.alive.values()))
    @rule(data=st.data(), choice=st.integers(1, 3))
    def fork(self, data: st.DataObject, choice: int) -> None:
        """Another choice, from somewhere in what is computed; with or without tokens of its own."""
        parent = data.draw(st.sampled_from([each for each in self.alive.values() if each.sequence.num_computed]))
        asked, has = parent.asked, parent.sequence.tokens[: parent.sequence.num_computed]
        own = self.model.alone(asked, choice).tokens
        accepted = own[: data.draw(st.integers(0, min(2, len(own) - 1)))] if own else ()
        tokens = [*asked.prompt, *accepted]
        most = next((i for i, (one, two) in enumerate(zip(has, tokens, strict=False)) if one != two), len(has))
        most = min(most, len(tokens) - 1)
        if most:
            num_computed = data.draw(st.integers(1, most))
            child = asked.sequence(
                self.engine, choice=choice, accepted=accepted, num_computed=num_computed, salt=parent.sequence.salt
            )
            self._begin(child, asked, parent.sequence)
            self.seen["forked"] += 1

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            with recording() as recorded:
                outputs = self.engine.step().outputs
            self.law_1()
            self.seen["in company"] += len(outputs) > 1
            for output in outputs:
                life = self.alive[output.key]
                self._check(life, output, score_bytes(recorded, output.sequence))
                if life.others and output.error is None:
                    self._fork_others(life, is_over=output.finish_reason is not None)
                if output.error is not None or output.finish_reason is not None:
                    assert self.alive.pop(output.key).sequence.is_finished

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._remove(data.draw(st.sampled_from(list(self.alive.values()))))
        self.seen["aborted"] += 1

    @precondition(lambda self: any(each.num_told for each in self.alive.values()))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Its accepted tokens are prefilled again, behind the prompt."""
        life = data.draw(st.sampled_from([each for each in self.alive.values() if each.num_told]))
        self._remove(life)
        choice, accepted = life.sequence.key.choice, life.answer.tokens[: life.num_told]
        self._begin(life.asked.sequence(self.engine, choice=choice, accepted=accepted), life.asked)
        self.seen["retried"] += 1

    @precondition(lambda self: any(one.sequence.state is SequenceState.PAUSED for one in self.alive.values()))
    @rule(what=st.sampled_from(("keep", "lease", "custody")))
    def detach(self, what: str) -> None:
        key, life = next((k, v) for k, v in self.alive.items() if v.sequence.state is SequenceState.PAUSED)
        taken = self.engine.detach(key)
        del self.alive[key]
        if what == "keep":
            self.detached.append(life)
            return
        if what == "lease":
            self.engine.pool.lease(taken.block_table)
            self.leased.append(taken.block_table)
        else:
            self.engine.pool.take_custody(taken.block_table)
            self.custody.append(taken.block_table)
        self.engine.pool.free(taken.block_table)
        if taken.reservation is not None:
            taken.reservation.release()

    @precondition(lambda self: self.detached)
    @rule()
    def bring_back(self) -> None:
        life = self.detached.pop()
        life.sequence.pause_at = None
        self.alive[life.sequence.key] = life
        self.engine.add(life.sequence)
        self.seen["brought back"] += 1

    @precondition(lambda self: self.leased)
    @rule()
    def end_lease(self) -> None:
        self.engine.pool.end_lease(self.leased.pop())

    @precondition(lambda self: self.custody)
    @rule()
    def end_custody(self) -> None:
        self.engine.pool.end_custody(self.custody.pop())

    # -- the laws -----------------------------------------------------------------------------------------------------

    @invariant()
    def law_1(self) -> None:
        counts = self.engine.pool.counts()
        assert counts.is_conserved()
        held = {block for each in (*self.alive.values(), *self.detached) for block in each.sequence.block_table}
        custody = {block for blocks in self.custody for block in blocks}
        assert counts.custody == len(custody) and counts.in_use == len(held - custody)
        assert counts.leased == len({block for blocks in self.leased for block in blocks} - held - custody)

    def teardown(self) -> None:
        """Law 2: whatever was going on, in the end nothing is left."""
        while self.leased:
            self.end_lease()
        while self.custody:
            self.end_custody()
        while self.detached:
            self.bring_back()
        for _ in range(self._most_steps()):
            self.step(1)
            for key, life in list(self.alive.items()):
                if life.sequence.state is SequenceState.PAUSED:  # its blocks may be what another waits for
                    self.engine.detach(key)
                    self.detached.append(self.alive.pop(key))
                    self.bring_back()
            if not self.engine.has_work:
                break
        assert not self.engine.has_work and not self.alive, "somebody never ends"
        assert self.engine.pool.counts().is_idle()

    def _most_steps(self) -> int:
        """Enough for all that is to be done: in each step somebody advances who will not be preempted for others."""
        lives = self.alive.values()
        return 10 + 2 * sum(len(life.asked.prompt) + len(life.answer.outputs) for life in lives)

    def _begin(self, sequence: Sequence, asked: Asked, parent: Sequence | None = None) -> None:
        if parent is None:
            self.engine.add(sequence)
        else:
            self.engine.fork(parent, [sequence])
        self.alive[sequence.key] = self._life(sequence, asked)

    def _remove(self, life: Life) -> None:
        del self.alive[life.sequence.key]
        assert self.engine.remove(life.sequence.key)
        assert life.sequence.block_table == []
        self._count(life.sequence)

    def _life(self, sequence: Sequence, asked: Asked) -> Life:
        answer = self.model.alone(asked, sequence.key.choice)
        is_scored = sequence.num_computed == 0
        return Life(
            sequence=sequence,
            asked=asked,
            answer=answer,
            num_told=sequence.num_generated,
            prompt_scores=answer.outputs[0].prompt_logprobs if is_scored else (),
        )

    def _fork_others(self, life: Life, *, is_over: bool) -> None:
        choices.fork_and_go_on(self.engine, leader=life.sequence, others=life.others, is_over=is_over)
        for other in life.others:
            self.alive[other.key] = self._life(other, life.asked)
        self.seen["several choices"] += 1
        life.others = ()

    def _check(self, life: Life, output: SequenceOutput, scores: tuple[bytes, ...]) -> None:
        """Law 3."""
        if isinstance(output.error, OutOfBlocks):  # it has outgrown the pool
            self._count(life.sequence)
            return
        expected = life.answer.outputs[life.num_told]
        assert type(output.error) is type(expected.error)
        assert scores == life.answer.scores[life.num_told : life.num_told + 1], "the scores have other bits"
        if output.error is None:
            assert (output.index, output.token_id) == (life.num_told, expected.token_id)
            assert output.logprobs == expected.logprobs
            assert (output.finish_reason, output.stop_token_id) == (expected.finish_reason, expected.stop_token_id)
            assert output.prompt_logprobs == life.prompt_scores
            life.num_told, life.prompt_scores = life.num_told + 1, ()
        if output.finish_reason is not None:
            self.seen.update(name for name, value in life.asked.options if value)
            self._count(life.sequence)

    def _count(self, sequence: Sequence) -> None:
        self.seen["preempted"] += sequence.num_preemptions
        self.seen["hit"] += sequence.num_cached > 0


def _check_laws(name: str, *, num_examples: int, num_rules: int) -> None:
    seen: Counter[str] = Counter()
    model = MODELS[name]()
    run_state_machine_as_test(
        lambda: EngineMachine(model, seen),
        settings=settings(max_examples=num_examples, stateful_step_count=num_rules, deadline=None),
    )
    print(name, dict(seen))
    missed = sorted((HAPPENED | OPTION_NAMES) - set(+seen))
    assert not missed, "the run has not met what it is about"


@pytest.mark.timeout(600)  # where a law is broken, the search for a small example takes its time
@pytest.mark.parametrize("name", ["float32", "int8, window and qk-norm", "mock"])
def test_laws_of_the_engine(name: str) -> None:
    _check_laws(name, num_examples=20, num_rules=30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_laws_of_the_engine_at_length(name: str) -> None:
    _check_laws(name, num_examples=1000, num_rules=50)
