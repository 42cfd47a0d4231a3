"""Laws 1 and 2 under anything a worker may do between two steps: add, fork, abort, lease, detach, bring back. All
prompts begin alike, so most blocks are shared."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import OutOfBlocks
from engine.block_pool import Reservation
from engine.engine import Engine, EngineConfig
from engine.sequence import Sequence, SequenceKey, SequenceState
from tests.support.engine_runs import make_sequence
from tests.support.random_llama import RandomLlama

FILES: Any = RandomLlama()
CONFIG = EngineConfig(block_size=4, num_blocks=24, max_step_tokens=16, max_sequences=4)
MODEL = Engine(FILES, CONFIG).model


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(FILES, CONFIG, model=MODEL)
        self.alive: dict[SequenceKey, Sequence] = {}
        self.detached: list[Sequence] = []
        self.leased: list[list[int]] = []
        self.custody: list[list[int]] = []
        self.expected: dict[SequenceKey, int] = {}

    def _add(self, sequence: Sequence) -> None:
        self.alive[sequence.key] = sequence
        self.expected.setdefault(sequence.key, sequence.num_generated)
        self.engine.add(sequence)

    @rule(length=st.integers(1, 40), new=st.integers(1, 30), promised=st.integers(0, 12), pauses=st.booleans())
    def add(self, length: int, new: int, promised: int, pauses: bool) -> None:
        reservation: Reservation | None = None
        try:
            reservation = self.engine.pool.reserve(promised) if promised else None
        except OutOfBlocks:
            return
        self._add(
            make_sequence(
                [3 + index % 90 for index in range(length)],
                max_tokens=new,
                ignore_eos=True,
                temperature=1.0,
                seed=length,
                pause_at=length + 1 if pauses else None,
                reservation=reservation,
            )
        )

    @precondition(lambda self: any(each.num_computed for each in self.alive.values()))
    @rule(data=st.data(), new=st.integers(1, 20), drawn=st.booleans())
    def fork(self, data: st.DataObject, new: int, drawn: bool) -> None:
        """A second choice, from somewhere in what is computed; with or without a token of its own."""
        parents = sorted(key for key, each in self.alive.items() if each.num_computed)
        parent = self.alive[data.draw(st.sampled_from(parents))]
        num_common = data.draw(st.integers(1, parent.num_computed))
        tokens = [*parent.tokens[:num_common], 5] if drawn else parent.tokens[:num_common]
        child = make_sequence(
            tokens, max_tokens=new, ignore_eos=True, temperature=1.0, num_computed=len(tokens) - 1, choice=1
        )
        self.alive[child.key] = child
        self.expected[child.key] = 0
        self.engine.fork(parent, [child])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step().outputs:
                if output.error is None:
                    assert output.index == self.expected[output.key], "a token lost or repeated"
                    self.expected[output.key] += 1
                else:
                    assert isinstance(output.error, OutOfBlocks)
                if output.error is not None or output.finish_reason is not None:
                    assert self.alive.pop(output.key).is_finished

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.engine.remove(key)
        assert self.alive.pop(key).block_table == []

    @rule(what=st.sampled_from(("lease", "custody", "keep")))
    def detach(self, what: str) -> None:
        for key, sequence in list(self.alive.items()):
            if sequence.state is not SequenceState.PAUSED:
                continue
            taken = self.engine.detach(key)
            del self.alive[key]
            if what != "keep":
                if what == "lease":
                    self.engine.pool.lease(taken.block_table)
                    self.leased.append(taken.block_table)
                else:
                    self.engine.pool.take_custody(taken.block_table)
                    self.custody.append(taken.block_table)
                self.engine.pool.free(taken.block_table)
                if taken.reservation is not None:
                    taken.reservation.release()
            else:
                self.detached.append(taken)
            return

    @precondition(lambda self: self.detached)
    @rule()
    def bring_back(self) -> None:
        sequence = self.detached.pop()
        sequence.pause_at = None
        self._add(sequence)

    @precondition(lambda self: self.leased)
    @rule()
    def end_lease(self) -> None:
        self.engine.pool.end_lease(self.leased.pop())

    @precondition(lambda self: self.custody)
    @rule()
    def end_custody(self) -> None:
        self.engine.pool.end_custody(self.custody.pop())

    @invariant()
    def law_1(self) -> None:
        counts = self.engine.pool.counts()
        assert counts.is_conserved()
        held = {block for each in (*self.alive.values(), *self.detached) for block in each.block_table}
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
        for _ in range(500):
            self.step(1)
            for key, sequence in list(self.alive.items()):
                if sequence.state is SequenceState.PAUSED:  # its blocks may be what another waits for
                    self.engine.remove(key)
                    del self.alive[key]
            if not self.engine.has_work:
                break
        assert not self.engine.has_work and not self.alive, "somebody never ends"
        assert self.engine.pool.counts().is_idle()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestEngineLaws = EngineMachine.TestCase
