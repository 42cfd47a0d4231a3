"""Split or local: by learned costs, by settings, and by what is missing."""

import random
from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.costs import StepWork
from core.types import CostSamples, HandoffSample, Mode, Role, StepSample, WorkerState, WorkerStatus
from router.absences import Absences
from router.break_even import Weights, explores
from router.cost_book import CostBook
from router.costs import Costs, HandoffLaw, StepLaw, num_pairs
from router.policy import Candidate, Choice, Lack, PolicySettings, Reason, Shortfall, Snapshot, decide
from tests.unit.router.builders import MODEL, make_candidate, make_load, make_registration, make_request

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
AUTO = PolicySettings()
OPEN = PolicySettings(weights=Weights(gap=0.5, itl=0.1, slack=100.0))
"""Gaps and running answers count in full, whatever that takes from the first token."""
STEPS = StepLaw(
    fixed_s=5e-3,
    decode_row_s=3e-4,
    decode_position_s=1e-7,
    prompt_token_s=1e-4,
    prompt_pair_s=1e-8,
    max_step_tokens=2048,
    max_mixed_tokens=1024,
)
HANDOFF = HandoffLaw(fixed_s=2e-2, byte_s=1e-9)
ROOMY = {"num_blocks": 10_000}


def snapshot(*candidates: Candidate, costs: Costs | None = None, absent: frozenset[Role] = frozenset()) -> Snapshot:
    pools = frozenset({(MODEL, P), (MODEL, D)} | {(c.model, c.role) for c in candidates})
    return Snapshot(
        candidates=candidates,
        pools=pools,
        costs=costs or Costs(),
        absent=frozenset((MODEL, role) for role in absent),
    )


def known(*candidates: Candidate, steps: StepLaw = STEPS, handoff: HandoffLaw = HANDOFF) -> Costs:
    """As if everything had been learned."""
    keys = {c.role: (c.address.worker_id, c.address.incarnation) for c in candidates}
    return Costs(
        steps=dict.fromkeys(keys.values(), steps),
        handoffs={(keys[P], keys[D]): handoff} if P in keys and D in keys else {},
        measured=frozenset({MODEL}),
    )


def pair(num_requests: int = 8, queued: int = 0) -> tuple[Candidate, Candidate]:
    """A prefill worker, and a decode worker with so many answers."""
    return (
        make_candidate("p0", P, queued_prompt_tokens=queued, num_requests=1 if queued else 0, **ROOMY),
        make_candidate("d0", D, num_requests=num_requests, used_blocks=num_requests * 20, **ROOMY),
    )


def choose(
    length: int, workers: tuple[Candidate, ...], costs: Costs, settings: PolicySettings = OPEN, request_id: str = "r0"
) -> Choice:
    request = make_request(request_id, num_prompt_tokens=length)
    outcome = decide(request, snapshot(*workers, costs=costs), settings)
    assert isinstance(outcome, Choice), outcome
    return outcome


def crossover(costs: Costs, workers: tuple[Candidate, ...], settings: PolicySettings = OPEN) -> int:
    """The shortest prompt that is split."""
    low, high = 1, 20_000
    while low < high:
        middle = (low + high) // 2
        if choose(middle, workers, costs, settings).path.mode is Mode.SPLIT:
            high = middle
        else:
            low = middle + 1
    return low


# -- by cost ----------------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_not_worth_a_hand_off_and_a_long_one_between_answers_is() -> None:
    workers = pair()
    costs = known(*workers)
    short, long = choose(20, workers, costs), choose(4000, workers, costs)
    assert (short.path.mode, short.reason) == (Mode.LOCAL, Reason.LOCAL_CHEAPER)
    assert str(short.runner_up) == "split:p0>d0"
    assert (long.path.mode, long.reason) == (Mode.SPLIT, Reason.SPLIT_CHEAPER)
    assert str(long.runner_up) == "local:d0"


def test_an_idle_decode_worker_prefills_itself_and_a_busy_one_lets_it_be() -> None:
    idle, busy = pair(num_requests=0), pair(num_requests=7)
    assert choose(2000, idle, known(*idle)).path.mode is Mode.LOCAL
    assert choose(2000, busy, known(*busy)).path.mode is Mode.SPLIT


def test_a_long_line_at_the_prefill_worker_makes_local_the_faster_way() -> None:
    free, lined = pair(), pair(queued=50_000)
    assert choose(2000, free, known(*free)).path.mode is Mode.SPLIT
    assert choose(2000, lined, known(*lined)).path.mode is Mode.LOCAL


def test_no_more_of_the_time_to_the_first_token_is_given_up_than_the_slack() -> None:
    """A short prompt beside running answers comes later; that its second token would come sooner does not make up."""
    busy, idle = pair(), pair(num_requests=0)
    dear = HandoffLaw(fixed_s=1.0, byte_s=0.0)
    for length in (20, 200, 2000):
        chosen = choose(length, busy, known(*busy, handoff=dear), AUTO)
        assert chosen.path.mode is Mode.SPLIT
        assert chosen.prediction.ttft_s < chosen.runner_up_prediction.ttft_s
        assert choose(length, idle, known(*idle, handoff=dear), AUTO).path.mode is Mode.LOCAL


def test_before_anything_is_measured_a_prefill_pool_is_used() -> None:
    for length in (1, 20, 5000):
        assert choose(length, pair(), Costs()).path.mode is Mode.SPLIT


@pytest.mark.parametrize(("mode", "expected"), [("split", Mode.SPLIT), ("local", Mode.LOCAL)])
def test_a_forced_mode_asks_nobody_for_costs(mode: str, expected: Mode) -> None:
    workers = pair()
    settings = PolicySettings(mode=mode, explore=0.5)  # type: ignore[arg-type]
    for number, length in enumerate((1, 20, 500, 5000)):
        assert choose(length, workers, known(*workers), settings, f"r{number}").path.mode is expected


def test_the_prediction_is_made_of_its_parts() -> None:
    workers = pair(queued=1000)
    costs = known(*workers)
    split = choose(3000, workers, costs, PolicySettings(mode="split")).prediction
    assert split.prefill_s == pytest.approx(costs.prefill_s(workers[0].address, 3000))
    assert split.transfer_s == pytest.approx(2e-2 + 1e-9 * 1024 * 128)  # blocks of the last step of 2048 tokens
    assert split.prefill_wait_s == pytest.approx(5e-3 + 0.1 + 1e-8 * 1000 * 500, rel=0.01)
    assert split.ttft_s == pytest.approx(split.prefill_wait_s + split.prefill_s) and split.itl_harm_s == 0
    local = choose(3000, workers, costs, PolicySettings(mode="local")).prediction
    assert local.prefill_s > split.prefill_s and local.transfer_s == 0
    assert local.itl_harm_s == pytest.approx(8 * (0.3 + 1e-8 * num_pairs(3000, 0)))


# -- exploring --------------------------------------------------------------------------------------------------------


def test_a_small_share_takes_the_other_way_and_says_so() -> None:
    workers = pair()
    costs = known(*workers)
    length = crossover(costs, workers) // 2
    settings = replace(OPEN, explore=0.02, seed=3)
    choices = [choose(length, workers, costs, settings, f"r{number}") for number in range(3000)]
    explored = [c for c in choices if c.reason is Reason.EXPLORED]
    assert 30 < len(explored) < 100
    assert {c.path.mode for c in explored} == {Mode.SPLIT}
    assert {c.path.mode for c in choices if c.reason is not Reason.EXPLORED} == {Mode.LOCAL}
    assert all(str(c.runner_up) == "local:d0" for c in explored)


def test_what_has_not_been_tried_for_long_is_tried() -> None:
    """Chance alone might leave it alone for hundreds of requests."""
    workers = pair()
    costs = known(*workers)
    length, settings = crossover(costs, workers) // 2, replace(OPEN, explore=0.02)

    def reason(**num_since: int) -> str:
        since = {(MODEL, Mode(mode)): number for mode, number in num_since.items()}
        cell = replace(snapshot(*workers, costs=costs), num_since=since)
        outcome = decide(make_request("r1", num_prompt_tokens=length), cell, settings)
        assert isinstance(outcome, Choice)
        return outcome.reason

    assert [reason(split=number) for number in (0, 24, 25)] == ["local_cheaper", "local_cheaper", "explored"]
    assert reason(local=1000) == "local_cheaper"


def test_who_explores_is_a_function_of_seed_and_request() -> None:
    ids = [f"r{number}" for number in range(500)]
    chosen = [each for each in ids if explores(each, share=0.1, seed=1)]
    assert chosen == [each for each in ids if explores(each, share=0.1, seed=1)]
    assert chosen != [each for each in ids if explores(each, share=0.1, seed=2)]
    assert not any(explores(each, share=0.0, seed=1) for each in ids)


def test_nobody_explores_what_is_several_times_as_dear_nor_in_a_retry() -> None:
    workers = pair(queued=100_000)
    costs = known(*workers)
    settings = replace(OPEN, explore=0.5)
    assert {choose(20, workers, costs, settings, f"r{n}").path.mode for n in range(200)} == {Mode.LOCAL}
    even = pair()
    for number in range(200):
        request = replace(make_request(f"r{number}", num_prompt_tokens=50), attempt=2)
        outcome = decide(request, snapshot(*even, costs=known(*even)), settings)
        assert isinstance(outcome, Choice) and outcome.reason is not Reason.EXPLORED


# -- the crossover follows --------------------------------------------------------------------------------------------


class Cell:
    """One pair that serves requests one after the other in virtual time; its router learns from heartbeats."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.book = CostBook()
        self.workers = pair()
        self.law, self.handoff = STEPS, HANDOFF
        self._p, self._d = (
            replace(make_registration(name, role=role), max_step_tokens=2048, max_mixed_tokens=1024)
            for name, role in (("p0", P), ("d0", D))
        )
        self._of_p: list[StepSample] = []
        self._of_d: list[StepSample] = []
        self._handoffs: list[HandoffSample] = []
        self._num_served = 0

    def serve(self, number: int) -> list[Choice]:
        return [self._serve(self.random.choice([20, 60, 150, 300, 600, 1200])) for _ in range(number)]

    def crossover(self) -> int:
        return crossover(self.book.costs(), self.workers)

    def true_crossover(self) -> int:
        return crossover(known(*self.workers, steps=self.law, handoff=self.handoff), self.workers)

    def _serve(self, length: int) -> Choice:
        self._num_served += 1
        settings = replace(OPEN, explore=0.02)
        choice = choose(length, self.workers, self.book.costs(), settings, f"r{self._num_served}")
        if choice.path.mode is Mode.SPLIT:
            self._step(self._of_p, 0, length, 0)
            num_bytes = 1024 * -(-length // 16)
            seconds = self.handoff.handoff_s(num_bytes) * self.random.lognormvariate(0, 0.1)
            key = (self._p.worker_id, self._p.incarnation)
            self._handoffs.append(HandoffSample(prefill=key, num_bytes=num_bytes, seconds=seconds))
        else:
            for start in range(0, length, 1024):
                self._step(self._of_d, 8, min(1024, length - start), start)
        self._step(self._of_d, self.random.randint(1, 8), 0, 0)
        if self._num_served % 8 == 0:
            self._beat()
        return choice

    def _step(self, samples: list[StepSample], num_rows: int, num_prompt: int, context: int) -> None:
        work = StepWork(
            num_prompt_tokens=num_prompt,
            num_prompt_pairs=num_pairs(num_prompt, context),
            num_decode_rows=num_rows,
            num_decode_positions=num_rows * self.random.randint(50, 500),
        )
        samples.append(StepSample(work=work, seconds=self.law.step_s(work) * self.random.lognormvariate(0, 0.1)))

    def _beat(self) -> None:
        """As a worker reports: the latest eight of each kind."""
        for registration, samples, handoffs in ((self._p, self._of_p, []), (self._d, self._of_d, self._handoffs)):
            prompts = [s for s in samples if s.work.num_prompt_tokens][-8:]
            answers = [s for s in samples if not s.work.num_prompt_tokens][-8:]
            self.book.learn(registration, CostSamples(steps=(*prompts, *answers), handoffs=tuple(handoffs[-8:])))
            samples.clear()
        self._handoffs.clear()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_the_crossover_follows_a_prefill_cost_that_changes_in_mid_run(factor: float, seed: int) -> None:
    cell = Cell(seed)
    cell.serve(400)
    before = cell.true_crossover()
    assert cell.crossover() == pytest.approx(before, rel=0.25)
    cell.law = replace(STEPS, prompt_token_s=factor * STEPS.prompt_token_s, prompt_pair_s=factor * STEPS.prompt_pair_s)
    after = cell.true_crossover()
    assert max(before, after) > 1.8 * min(before, after), "or this shows nothing"
    cell.serve(200)
    assert cell.crossover() == pytest.approx(after, rel=0.25)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_the_crossover_follows_a_hand_off_cost_that_changes_in_mid_run(factor: float) -> None:
    cell = Cell(1)
    cell.serve(400)
    before = cell.crossover()
    cell.handoff = HandoffLaw(fixed_s=factor * HANDOFF.fixed_s, byte_s=factor * HANDOFF.byte_s)
    after = cell.true_crossover()
    assert max(before, after) > 1.8 * min(before, after), "or this shows nothing"
    cell.serve(200)
    assert cell.crossover() == pytest.approx(after, rel=0.25)


# -- when a role is missing -------------------------------------------------------------------------------------------


def outcome_of(settings: PolicySettings, length: int = 100, **cell: object) -> Choice | Shortfall:
    return decide(make_request(num_prompt_tokens=length), snapshot(pair()[1], **cell), settings)  # type: ignore[arg-type]


def test_a_missing_prefill_pool_is_replaced_by_local_prefills_as_the_setting_says() -> None:
    gone = frozenset({P})
    allowed = outcome_of(PolicySettings(fallback="allow"), absent=gone)
    assert isinstance(allowed, Choice) and allowed.reason is Reason.PREFILL_MISSING and str(allowed.path) == "local:d0"
    denied = outcome_of(PolicySettings(fallback="deny"), absent=gone)
    assert isinstance(denied, Shortfall) and denied.lack is Lack.NO_PREFILL
    assert denied.message.endswith("decode workers may not prefill it themselves (router.fallback is deny)")
    short = PolicySettings(fallback="when_short", fallback_tokens=100)
    assert isinstance(outcome_of(short, 100, absent=gone), Choice)
    assert isinstance(outcome_of(short, 101, absent=gone), Shortfall)


def test_a_pool_that_may_only_be_starting_anew_is_waited_for() -> None:
    assert isinstance(outcome_of(PolicySettings()), Shortfall)


def test_prefill_workers_that_all_failed_this_request_are_missing_at_once() -> None:
    workers = pair()
    request = make_request(excluded_workers=(("p0", 1),))
    outcome = decide(request, snapshot(*workers), PolicySettings())
    assert isinstance(outcome, Choice) and outcome.reason is Reason.PREFILL_MISSING
    assert isinstance(decide(request, snapshot(*workers), PolicySettings(fallback="deny")), Shortfall)


def test_failed_pairs_fall_back_only_as_far_as_allowed() -> None:
    workers = pair()
    for length, reason in ((100, Reason.PAIR_EXCLUDED), (101, Reason.ONLY_PAIR_LEFT)):
        request = make_request(num_prompt_tokens=length, excluded_pairs=(("p0", "d0"),))
        settings = PolicySettings(fallback="when_short", fallback_tokens=100)
        outcome = decide(request, snapshot(*workers, costs=known(*workers)), settings)
        assert isinstance(outcome, Choice) and outcome.reason is reason


def test_a_pool_is_absent_when_nobody_was_ready_for_a_while() -> None:
    clock = ManualClock()
    absences = Absences(clock, after_s=2.0)

    def worker(state: WorkerState) -> WorkerStatus:
        return WorkerStatus(
            registration=make_registration("p0", role=P), load=make_load(), state=state, heartbeat_age_s=0.0
        )

    pools = [(MODEL, P)]
    assert absences.look(pools, []) == frozenset()
    clock.advance(2.0)
    assert absences.look(pools, [worker(WorkerState.SUSPECT)]) == {(MODEL, P)}
    assert absences.look(pools, [worker(WorkerState.READY)]) == frozenset()
    clock.advance(5.0)
    assert absences.look(pools, []) == frozenset()
    clock.advance(1.9)
    assert absences.look(pools, []) == frozenset()
    clock.advance(0.1)
    assert absences.look(pools, []) == {(MODEL, P)}
    assert absences.look([], []) == frozenset()
