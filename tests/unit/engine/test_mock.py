"""Mock execution: an engine without a model. That its answers obey the laws is tested with the others'
(test_engine_laws.py)."""

from __future__ import annotations

from typing import Any

import pytest

from core.costs import StepCosts
from engine.engine import Engine, EngineConfig
from engine.mock import MockExecution, Pace
from engine.scheduler import Chunk, work_of
from engine.sequence import Sequence
from tests.support.engine_runs import make_sequence, run
from tests.support.random_llama import RandomLlama

FREE = StepCosts.linear(fixed_s=0.0, prompt_token_s=0.0, decode_row_s=0.0)
PROMPT = tuple(range(3, 40))


class Weightless(RandomLlama):
    def load_tensor(self, name: str) -> Any:
        raise AssertionError("mock execution reads no weights")


def mock_engine(**changes: Any) -> Engine:
    files: Any = Weightless()
    return Engine(files, EngineConfig(**{"num_blocks": 40, "block_size": 4, "costs": FREE, **changes}))


def answer(engine: Engine, prompt: tuple[int, ...] = PROMPT, **options: Any) -> list[int]:
    sequence = make_sequence(prompt, **{"max_tokens": 12, **options})
    run(engine, sequence)
    return sequence.tokens[len(prompt) :]


def test_no_weights_are_read_and_the_answer_is_the_same_everywhere() -> None:
    assert answer(mock_engine()) == answer(mock_engine(block_size=16, num_blocks=8, max_step_tokens=64))


def test_an_answer_depends_on_every_token_of_its_prompt() -> None:
    engine = mock_engine(prefix_cache=False)
    answers = [answer(engine, (*PROMPT[:at], 99, *PROMPT[at + 1 :])) for at in range(len(PROMPT))]
    assert len({tuple(each) for each in (answer(engine), *answers)}) == len(PROMPT) + 1
    assert answer(engine, PROMPT[::-1]) != answer(engine)


def test_sampled_answers_depend_on_seed_and_choice_and_greedy_ones_do_not() -> None:
    engine = mock_engine()
    warm = [answer(engine, temperature=1.0, seed=seed, choice=choice) for seed in (1, 2) for choice in (0, 1)]
    assert len({tuple(each) for each in warm}) == 4
    assert answer(engine, temperature=1.0, seed=1, choice=0) == warm[0]
    assert answer(engine, seed=1, choice=0) == answer(engine, seed=2, choice=1)


@pytest.mark.parametrize("at", range(9))
def test_a_wrong_byte_in_any_block_of_the_context_changes_the_answer(at: int) -> None:
    engine = mock_engine()
    right = answer(engine)
    sequence = make_sequence(PROMPT, max_tokens=12, pause_at=len(PROMPT) + 1)
    run(engine, sequence)
    engine.cache.array.view("u1").reshape(40, -1)[sequence.block_table[at], 8 * at % 64] ^= 1
    held = engine.detach(sequence.key)
    held.pause_at = None
    run(engine, held)
    assert held.tokens[len(PROMPT) + 1 :] != right[1:]


def test_options_that_shape_an_answer_are_honoured() -> None:
    engine = mock_engine()
    assert set(answer(engine, allowed_token_ids=(40, 41))) <= {40, 41}
    assert answer(engine, logit_bias=((50, 1000.0),)) == [50] * 12
    sequence = make_sequence(PROMPT, max_tokens=3, logprobs=2, prompt_logprobs=1)
    outputs = run(engine, sequence).outputs[sequence.key]
    assert [len(output.logprobs.top) for output in outputs if output.logprobs] == [2, 2, 2]
    assert len(outputs[0].prompt_logprobs) == len(PROMPT) - 1


def test_answers_are_words_of_the_tokenizer_and_end_at_their_limit() -> None:
    tokens = answer(mock_engine(), max_tokens=100, eos_token_ids=(2,))
    assert len(tokens) == 100 and min(tokens) >= 32


def test_a_mock_worker_has_the_blocks_of_a_real_one_in_little_memory_and_pairs_with_none() -> None:
    files: Any = Weightless()
    config = {"memory_bytes": 1 << 20, "block_size": 4}
    real = Engine(RandomLlama(), EngineConfig(**config))  # type: ignore[arg-type]
    mock = Engine(files, EngineConfig(**config, costs=FREE))  # type: ignore[arg-type]
    assert mock.limits.num_blocks == real.limits.num_blocks
    assert mock.limits.block_bytes == 4 * 16 < real.limits.block_bytes
    assert (mock.limits.is_mock, real.limits.is_mock) == (True, False)
    assert any("compute_dtype" in each for each in mock.format.differences(real.format))


# -- what a step costs ------------------------------------------------------------------------------------------------


def chunk(num_prompt: int, start: int, num_tokens: int, num_generated: int = 0) -> Chunk:
    sequence: Sequence = make_sequence(range(3, 3 + num_prompt + num_generated), num_prompt_tokens=num_prompt)
    return Chunk(sequence=sequence, start=start, num_tokens=num_tokens)


def test_the_work_of_a_step_is_counted() -> None:
    work = work_of([chunk(20, 0, 8), chunk(20, 19, 1), chunk(10, 10, 1, 1), chunk(10, 12, 1, 3), chunk(10, 10, 5, 5)])
    assert work.num_prompt_tokens == 8 + 1 + 5
    assert work.num_prompt_pairs == sum(range(1, 9)) + 20 + sum(range(11, 16))
    assert (work.num_decode_rows, work.num_decode_positions) == (2, 11 + 13)


class SlowClock:
    """Its sleeps end late, and whatever is done between takes time."""

    def __init__(self, late_s: float) -> None:
        self.time = 0.0
        self.late_s = late_s

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds + self.late_s


def test_many_steps_take_what_they_should_however_late_each_ends() -> None:
    clock = SlowClock(late_s=0.004)
    pace = Pace(now=clock.now, sleep=clock.sleep)
    for _ in range(1000):
        started = pace.start()
        clock.time += 0.001  # the work of the step
        pace.finish(started, 0.010)
        clock.time += 0.001  # and between two steps
    assert clock.time == pytest.approx(10.0, abs=0.01)


def test_time_without_work_is_not_made_good() -> None:
    clock = SlowClock(late_s=0.0)
    pace = Pace(now=clock.now, sleep=clock.sleep)
    pace.finish(pace.start(), 0.010)
    clock.time += 1.0
    started = clock.time
    pace.finish(pace.start(), 0.010)
    assert clock.time - started == pytest.approx(0.010)


def test_costs_may_change_while_the_engine_runs() -> None:
    clock = SlowClock(late_s=0.0)
    engine = mock_engine()
    engine.execution = MockExecution(FREE, engine.cache, RandomLlama(), pace=Pace(now=clock.now, sleep=clock.sleep))  # type: ignore[arg-type]
    answer(engine)
    assert clock.time == 0.0
    engine.execution.costs = StepCosts.linear(fixed_s=0.5, prompt_token_s=0.0, decode_row_s=0.0)
    answer(engine)
    assert clock.time == pytest.approx(12 * 0.5)
