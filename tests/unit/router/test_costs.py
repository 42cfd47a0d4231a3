"""Costs are learned from samples of single steps and hand-offs."""

import random
from dataclasses import replace

import pytest

from core.costs import StepWork
from core.ids import Incarnation, WorkerId
from core.types import CostSamples, HandoffSample, Role, StepSample, WorkerAddress, WorkerRegistration
from router.cost_book import CostBook
from router.costs import Costs, StepLaw, num_pairs
from tests.unit.router.builders import make_registration

TRUTH = StepLaw(fixed_s=2e-2, decode_row_s=5e-4, decode_position_s=2e-7, prompt_token_s=3e-4, prompt_pair_s=2e-8)
LENGTHS = (30, 100, 400, 900, 1800)


class Machine:
    """Workers that take what a law says, give or take a tenth."""

    def __init__(self, seed: int = 1) -> None:
        self.book = CostBook()
        self._random = random.Random(seed)

    def noise(self) -> float:
        return self._random.lognormvariate(0.0, 0.1)

    def prompts(self, *lengths: int, law: StepLaw = TRUTH) -> CostSamples:
        works = [StepWork(num_prompt_tokens=n, num_prompt_pairs=num_pairs(n, 0)) for n in lengths]
        return self._take(works, law)

    def answers(self, number: int = 8, law: StepLaw = TRUTH) -> CostSamples:
        rows = [self._random.randint(1, 32) for _ in range(number)]
        return self._take(
            [StepWork(num_decode_rows=n, num_decode_positions=n * self._random.randint(50, 2000)) for n in rows], law
        )

    def mixed(self, number: int = 8) -> CostSamples:
        return self.prompts(*(self._random.choice(LENGTHS) for _ in range(number)))

    def _take(self, works: list[StepWork], law: StepLaw) -> CostSamples:
        return CostSamples(steps=tuple(StepSample(work=w, seconds=law.step_s(w) * self.noise()) for w in works))


def worker(name: str, role: Role, incarnation: int = 1, model: str = "tiny") -> WorkerRegistration:
    registration = make_registration(name, incarnation, role, model=model)
    return replace(registration, max_step_tokens=4096, max_mixed_tokens=256)


P0, P1, D0, D1 = (
    worker("p0", Role.PREFILL),
    worker("p1", Role.PREFILL),
    worker("d0", Role.DECODE),
    worker("d1", Role.DECODE),
)


def address(registration: WorkerRegistration) -> WorkerAddress:
    return WorkerAddress(
        worker_id=registration.worker_id, incarnation=registration.incarnation, address=registration.address
    )


def key(registration: WorkerRegistration) -> tuple[WorkerId, Incarnation]:
    return registration.worker_id, registration.incarnation


def prefill_s(book: CostBook, registration: WorkerRegistration, length: int) -> float:
    return book.costs().prefill_s(address(registration), length)


def true_s(length: int, law: StepLaw = TRUTH) -> float:
    return law.step_s(StepWork(num_prompt_tokens=length, num_prompt_pairs=num_pairs(length, 0)))


def test_both_kinds_of_step_are_told_apart() -> None:
    machine = Machine()
    for _ in range(12):
        machine.book.learn(D0, machine.mixed())
        machine.book.learn(D0, machine.answers())
    for length in LENGTHS:
        assert prefill_s(machine.book, D0, length) == pytest.approx(true_s(length), rel=0.15)
    costs = machine.book.costs()
    for rows, tokens in ((1, 100), (8, 8000), (32, 32000)):
        expected = TRUTH.step_s(StepWork(num_decode_rows=rows, num_decode_positions=tokens))
        assert costs.step_s(address(D0), rows, tokens) == pytest.approx(expected, rel=0.15)


def test_prompts_of_one_length_teach_that_length_and_something_sound_about_others() -> None:
    machine = Machine()
    for _ in range(10):
        machine.book.learn(P0, machine.prompts(*[100] * 8))
    assert prefill_s(machine.book, P0, 100) == pytest.approx(true_s(100), rel=0.1)
    for length in (50, 200, 800):
        assert true_s(length) / 2 < prefill_s(machine.book, P0, length) < true_s(length) * 2


def test_what_was_learned_of_other_lengths_survives_a_thousand_prompts_of_one() -> None:
    machine = Machine()
    for _ in range(12):
        machine.book.learn(P0, machine.mixed())
    for _ in range(125):
        machine.book.learn(P0, machine.prompts(*[100] * 8))
    for length in LENGTHS:
        assert prefill_s(machine.book, P0, length) == pytest.approx(true_s(length), rel=0.15)


def test_answers_alone_take_nothing_from_what_is_known_of_prompts() -> None:
    machine = Machine()
    for _ in range(12):
        machine.book.learn(D0, machine.mixed())
    for _ in range(125):
        machine.book.learn(D0, machine.answers())
    for length in LENGTHS:
        assert prefill_s(machine.book, D0, length) == pytest.approx(true_s(length), rel=0.15)


def test_a_decode_worker_that_read_no_prompt_yet_is_known_from_the_prefill_workers() -> None:
    machine = Machine()
    for _ in range(6):
        machine.book.learn(P0, machine.mixed())
        machine.book.learn(D0, machine.answers())
    machine.book.learn(D0, CostSamples())
    for length in LENGTHS:
        assert prefill_s(machine.book, D0, length) == pytest.approx(true_s(length), rel=0.25)


def test_a_new_worker_begins_where_its_pool_is_also_when_the_old_one_is_gone() -> None:
    machine = Machine()
    for _ in range(6):
        machine.book.learn(P0, machine.mixed())
    machine.book.learn(P1, CostSamples())
    again = worker("p0", Role.PREFILL, incarnation=2)
    machine.book.expire([key(P1)])
    machine.book.learn(again, CostSamples())
    for registration in (P1, again):
        for length in LENGTHS:
            assert prefill_s(machine.book, registration, length) == pytest.approx(true_s(length), rel=0.2)
    assert set(machine.book.costs().steps) == {key(P1), key(again)}


def test_a_slow_worker_is_told_from_its_pool_and_slow_everywhere() -> None:
    machine = Machine()
    slow = replace(
        TRUTH,
        fixed_s=3 * TRUTH.fixed_s,
        prompt_token_s=3 * TRUTH.prompt_token_s,
        prompt_pair_s=3 * TRUTH.prompt_pair_s,
    )
    for _ in range(8):
        machine.book.learn(P0, machine.mixed())
        machine.book.learn(P1, machine.prompts(*[100] * 8, law=slow))
    assert prefill_s(machine.book, P0, 900) == pytest.approx(true_s(900), rel=0.15)
    for length in LENGTHS:
        assert prefill_s(machine.book, P1, length) == pytest.approx(true_s(length, slow), rel=0.3)


def test_models_do_not_teach_each_other() -> None:
    machine = Machine()
    other = worker("p9", Role.PREFILL, model="other")
    machine.book.learn(P0, machine.mixed(16))
    machine.book.learn(other, CostSamples())
    assert prefill_s(machine.book, other, 400) == pytest.approx(Costs().prefill_s(address(other), 400))
    assert machine.book.costs().measured == {"tiny"}


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_cost_that_changes_is_followed_within_a_few_heartbeats(factor: float) -> None:
    machine = Machine()
    for _ in range(20):
        machine.book.learn(P0, machine.mixed())
    law = replace(TRUTH, prompt_token_s=factor * TRUTH.prompt_token_s, prompt_pair_s=factor * TRUTH.prompt_pair_s)
    for _ in range(6):
        machine.book.learn(P0, machine.prompts(*LENGTHS, 700, 1300, law=law))
    for length in (400, 900, 1800):
        assert prefill_s(machine.book, P0, length) == pytest.approx(true_s(length, law), rel=0.2)


def test_a_machine_that_stood_still_for_two_steps_changes_nothing_much() -> None:
    machine = Machine()
    for _ in range(10):
        machine.book.learn(P0, machine.mixed())
    before = [prefill_s(machine.book, P0, length) for length in LENGTHS]
    frozen = CostSamples(steps=tuple(replace(s, seconds=40 * s.seconds) for s in machine.mixed(2).steps))
    machine.book.learn(P0, frozen)
    for length, was in zip(LENGTHS, before, strict=True):
        assert prefill_s(machine.book, P0, length) == pytest.approx(was, rel=0.1)


def test_two_steps_that_are_much_quicker_are_believed() -> None:
    """Nothing is quick by accident. A worker that was slow is tried seldom."""
    machine = Machine()
    for _ in range(10):
        machine.book.learn(P0, machine.mixed())
    quick = CostSamples(steps=tuple(replace(s, seconds=s.seconds / 4) for s in machine.prompts(400, 900).steps))
    machine.book.learn(P0, quick)
    assert prefill_s(machine.book, P0, 900) < true_s(900) / 2


def test_nothing_that_is_no_time_is_learned() -> None:
    machine = Machine()
    machine.book.learn(P0, machine.mixed())
    before = prefill_s(machine.book, P0, 400)
    (step,) = machine.prompts(400).steps
    bad = [replace(step, seconds=each) for each in (float("nan"), float("inf"), 0.0, -1.0)]
    machine.book.learn(P0, CostSamples(steps=tuple(bad)))
    assert prefill_s(machine.book, P0, 400) == pytest.approx(before)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_ever_negative(seed: int) -> None:
    rng, machine = random.Random(seed), Machine(seed)
    for _ in range(30):
        law = StepLaw(
            fixed_s=rng.choice([0.0, 1e-3]),
            decode_row_s=rng.choice([0.0, 1e-2]),
            decode_position_s=rng.choice([0.0, 1e-5]),
            prompt_token_s=rng.choice([1e-6, 1e-2]),
            prompt_pair_s=rng.choice([0.0, 1e-6]),
        )
        samples = machine.prompts(*rng.choices(LENGTHS, k=4), law=law).steps + machine.answers(4, law=law).steps
        registration = rng.choice([P0, D0, D1])
        machine.book.learn(registration, CostSamples(steps=samples))
        cost = machine.book.costs().of(address(registration))
        assert (
            min(cost.fixed_s, cost.decode_row_s, cost.decode_position_s, cost.prompt_token_s, cost.prompt_pair_s) >= 0
        )
        assert max(cost.prompt_token_s, cost.fixed_s) < 1.0


def test_hand_offs_are_learned_by_pair_and_a_new_pair_is_like_the_others() -> None:
    machine = Machine()

    def samples(prefill: WorkerRegistration, byte_s: float) -> CostSamples:
        sizes = [1 << 16, 1 << 20, 1 << 22, 1 << 24]
        return CostSamples(
            handoffs=tuple(
                HandoffSample(prefill=key(prefill), num_bytes=size, seconds=(3e-3 + byte_s * size) * machine.noise())
                for size in sizes
            )
        )

    for _ in range(8):
        machine.book.learn(D0, samples(P0, 1e-9))
        machine.book.learn(D0, samples(P1, 2e-8))
    machine.book.learn(D1, CostSamples())
    costs = machine.book.costs()
    near = costs.handoff_s(address(P0), address(D0), 1 << 24)
    far = costs.handoff_s(address(P1), address(D0), 1 << 24)
    assert near == pytest.approx(3e-3 + 1e-9 * (1 << 24), rel=0.2)
    assert far == pytest.approx(3e-3 + 2e-8 * (1 << 24), rel=0.2)
    assert near < costs.handoff_s(address(P0), address(D1), 1 << 24) < far
    machine.book.expire([key(P1), key(D0), key(D1)])
    assert set(machine.book.costs().handoffs) == {(key(P1), key(D0))}


# -- what the numbers are used for ------------------------------------------------------------------------------------


def costs_of(law: StepLaw) -> Costs:
    return Costs(steps={key(D0): replace(law, max_step_tokens=1000, max_mixed_tokens=100)})


def test_a_prompt_longer_than_a_step_pays_for_every_step() -> None:
    costs = costs_of(StepLaw(fixed_s=1.0, decode_row_s=0, decode_position_s=0, prompt_token_s=0.01, prompt_pair_s=0))
    assert costs.prefill_s(address(D0), 1000) == pytest.approx(11.0)
    assert costs.prefill_s(address(D0), 1001) == pytest.approx(12.01)


def test_a_context_that_is_there_is_attended_to_and_not_computed() -> None:
    costs = costs_of(StepLaw(fixed_s=0, decode_row_s=0, decode_position_s=0, prompt_token_s=1.0, prompt_pair_s=0.1))
    assert costs.prefill_s(address(D0), 2, 10) == pytest.approx(2 + 0.1 * (11 + 12))


def test_a_local_prefill_waits_for_the_answers_between_its_chunks_and_they_for_it() -> None:
    costs = costs_of(StepLaw(fixed_s=1.0, decode_row_s=0.1, decode_position_s=0, prompt_token_s=0.01, prompt_pair_s=0))
    alone = costs.local_prefill_s(address(D0), 500)
    beside = costs.local_prefill_s(address(D0), 500, num_rows=10)
    assert alone == pytest.approx(1 + 5)
    assert beside == pytest.approx(5 * (1 + 1) + 5)
    assert costs.itl_harm_s(address(D0), 500, num_rows=10) == pytest.approx(10 * 5)
    assert costs.itl_harm_s(address(D0), 500, num_rows=0) == 0
