"""The policy over snapshots: examples, and law 6 as properties."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.ids import WorkerId
from core.types import Mode, PlaceRequest, Role, WorkerState
from router.policy import (
    Candidate,
    Choice,
    Lack,
    PolicySettings,
    Reason,
    Shortfall,
    Snapshot,
    decide,
    lack_of_path,
)
from tests.unit.router.builders import MODEL, make_candidate, make_request

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
AUTO = PolicySettings()


def snapshot(*candidates: Candidate, pools: tuple[Role, ...] = (), **overlaps: int) -> Snapshot:
    """``overlaps``: blocks of the request by worker."""
    present = {(c.model, c.role) for c in candidates}
    incarnations = {c.address.worker_id: c.address.incarnation for c in candidates}
    return Snapshot(
        candidates=candidates,
        pools=frozenset(present | {(MODEL, role) for role in pools}),
        overlaps={(WorkerId(name), incarnations[WorkerId(name)]): blocks for name, blocks in overlaps.items()},
    )


def chosen(outcome: Choice | Shortfall) -> str:
    assert isinstance(outcome, Choice), outcome
    return str(outcome.path)


def missing(outcome: Choice | Shortfall) -> Shortfall:
    assert isinstance(outcome, Shortfall), outcome
    return outcome


# -- modes ------------------------------------------------------------------------------------------------------------


def test_a_prefill_and_a_decode_worker_make_a_split_path() -> None:
    outcome = decide(make_request(), snapshot(make_candidate("p0", P), make_candidate("d0", D)), AUTO)
    assert chosen(outcome) == "split:p0>d0"
    assert isinstance(outcome, Choice) and outcome.reason is Reason.ONLY_PATH and outcome.runner_up is None


def test_a_unified_worker_is_local_under_every_setting() -> None:
    for mode in ("auto", "split", "local"):
        outcome = decide(make_request(), snapshot(make_candidate("u0", U)), PolicySettings(mode=mode))
        assert chosen(outcome) == "local:u0"


def test_local_forced_lets_the_decode_worker_prefill() -> None:
    workers = snapshot(make_candidate("p0", P), make_candidate("d0", D))
    assert chosen(decide(make_request(), workers, PolicySettings(mode="local"))) == "local:d0"


def test_a_decode_pool_without_a_prefill_pool_serves_locally() -> None:
    assert chosen(decide(make_request(), snapshot(make_candidate("d0", D)), AUTO)) == "local:d0"


def test_a_prefill_worker_that_may_only_be_starting_anew_is_waited_for() -> None:
    outcome = missing(decide(make_request(), snapshot(make_candidate("d0", D), pools=(P,)), AUTO))
    assert outcome.lack is Lack.NO_PREFILL
    assert outcome.message == "model 'tiny' has no ready prefill worker (none registered)"


# -- filters ----------------------------------------------------------------------------------------------------------


def test_the_shortfall_names_what_is_there_instead() -> None:
    workers = snapshot(
        make_candidate("p0", P),
        make_candidate("d0", D, state=WorkerState.SUSPECT),
        make_candidate("d1", D, state=WorkerState.STARTING),
        make_candidate("d2", D),
    )
    outcome = missing(decide(make_request(excluded_workers=(("d2", 1),)), workers, AUTO))
    assert outcome.lack is Lack.NO_DECODE
    assert outcome.message.endswith("no ready decode worker (1 failed this request, 1 starting, 1 suspect)")


def test_a_restarted_worker_is_not_the_excluded_one() -> None:
    request = make_request(excluded_workers=(("u0", 1),))
    assert missing(decide(request, snapshot(make_candidate("u0", U)), AUTO))
    assert chosen(decide(request, snapshot(make_candidate("u0", U, incarnation=2)), AUTO)) == "local:u0"


def test_unequal_formats_are_never_paired() -> None:
    old, new = make_candidate("p0", P, format_hash="old"), make_candidate("d0", D, format_hash="new")
    assert missing(decide(make_request(), snapshot(old, new), AUTO)).lack is Lack.NO_PAIR
    busy = make_candidate("d1", D, format_hash="old", used_blocks=90)
    assert chosen(decide(make_request(), snapshot(old, new, busy), AUTO)) == "split:p0>d1"


def test_another_models_workers_do_not_count() -> None:
    workers = snapshot(make_candidate("u0", U, model="other"), pools=(P, D))
    outcome = missing(decide(make_request(), workers, AUTO))
    assert outcome.lack is Lack.NO_WORKER
    assert "no ready prefill worker" in outcome.message and "no ready decode worker" in outcome.message


def test_a_prompt_that_no_worker_could_ever_hold_is_told_apart() -> None:
    outcome = missing(decide(make_request(num_prompt_tokens=1600), snapshot(make_candidate("u0", U)), AUTO))
    assert outcome.lack is Lack.TOO_LONG and "1600 tokens" in outcome.message
    assert chosen(decide(make_request(num_prompt_tokens=1599), snapshot(make_candidate("u0", U)), AUTO))


def test_an_excluded_pair_gives_way_to_another_pair() -> None:
    workers = snapshot(
        make_candidate("p0", P), make_candidate("p1", P, queued_prompt_tokens=9000), make_candidate("d0")
    )
    assert chosen(decide(make_request(excluded_pairs=(("p0", "d0"),)), workers, AUTO)) == "split:p1>d0"


def test_a_restarted_worker_is_a_new_pair() -> None:
    workers = snapshot(make_candidate("p0", P, incarnation=2), make_candidate("d0", D))
    assert chosen(decide(make_request(excluded_pairs=(("p0", "d0"),)), workers, AUTO)) == "split:p0>d0"


def test_when_every_pair_failed_the_decode_worker_prefills_itself_and_says_so() -> None:
    workers = snapshot(make_candidate("p0", P), make_candidate("d0", D))
    request = make_request(excluded_pairs=(("p0", "d0"),))
    outcome = decide(request, workers, AUTO)
    assert chosen(outcome) == "local:d0"
    assert isinstance(outcome, Choice) and outcome.reason is Reason.PAIR_EXCLUDED
    denied = decide(request, workers, PolicySettings(fallback="deny"))
    assert chosen(denied) == "split:p0>d0"
    assert isinstance(denied, Choice) and denied.reason is Reason.ONLY_PAIR_LEFT


# -- what is held ------------------------------------------------------------------------------------------------------


def test_what_is_held_needs_the_best_decode_worker_only() -> None:
    holder = make_candidate("p0", P, queued_prompt_tokens=9000)
    workers = snapshot(
        holder, make_candidate("p1", P), make_candidate("d0", D, used_blocks=50), make_candidate("d1", D)
    )
    outcome = decide(make_request(holder=holder.address), workers, AUTO)
    assert chosen(outcome) == "split:p0>d1"
    assert isinstance(outcome, Choice) and outcome.reason is Reason.HELD and outcome.path.is_held
    assert outcome.prediction.prefill_s == 0


def test_a_holder_that_drains_gives_what_it_holds() -> None:
    holder = make_candidate("p0", P, state=WorkerState.DRAINING)
    workers = snapshot(holder, make_candidate("p1", P), make_candidate("d0", D))
    assert chosen(decide(make_request(holder=holder.address), workers, AUTO)) == "split:p0>d0"
    assert chosen(decide(make_request(), workers, AUTO)) == "split:p1>d0"


@pytest.mark.parametrize(
    ("holder", "request_"),
    [
        (make_candidate("p0", P, state=WorkerState.LOST), {}),
        (make_candidate("p0", P, incarnation=2), {}),
        (make_candidate("p0", P, format_hash="f1"), {}),
        (make_candidate("p0", P), {"excluded_workers": (("p0", 1),)}),
        (make_candidate("p0", P), {"excluded_pairs": (("p0", "d0"),)}),
    ],
    ids=["lost", "restarted", "of another format", "blamed", "of a failed pair"],
)
def test_what_cannot_be_had_is_computed_again(holder: Candidate, request_: dict[str, object]) -> None:
    workers = snapshot(holder, make_candidate("p1", P), make_candidate("d0", D))
    asked = make_request(holder=make_candidate("p0", P).address, **request_)  # type: ignore[arg-type]
    outcome = decide(asked, workers, AUTO)
    assert isinstance(outcome, Choice) and not outcome.path.is_held


# -- scores -----------------------------------------------------------------------------------------------------------


def test_the_least_loaded_pair_wins_and_the_second_best_is_named() -> None:
    workers = snapshot(
        make_candidate("p0", P, queued_prompt_tokens=500),
        make_candidate("p1", P),
        make_candidate("d0", D, used_blocks=10),
        make_candidate("d1", D, used_blocks=50),
    )
    outcome = decide(make_request(), workers, AUTO)
    assert isinstance(outcome, Choice)
    assert str(outcome.path) == "split:p1>d0" and str(outcome.runner_up) == "split:p1>d1"
    assert outcome.reason is Reason.LEAST_LOADED


def test_equal_workers_take_turns() -> None:
    workers = snapshot(make_candidate("u0", U, num_placed=3), make_candidate("u1", U, num_placed=2))
    outcome = decide(make_request(), workers, AUTO)
    assert chosen(outcome) == "local:u1"
    assert isinstance(outcome, Choice) and outcome.reason is Reason.LEAST_USED


def test_waiting_for_room_outweighs_a_longer_batch() -> None:
    full = make_candidate("u0", U, used_blocks=100)
    busy = make_candidate("u1", U, used_blocks=60, num_requests=7)
    assert chosen(decide(make_request(num_prompt_tokens=400), snapshot(full, busy), AUTO)) == "local:u1"


@pytest.mark.parametrize("role", [P, U])
def test_who_holds_the_prompts_beginning_reads_it(role: Role) -> None:
    workers = [make_candidate("w0", role), make_candidate("w1", role, num_placed=9), make_candidate("d0", D)]
    outcome = decide(make_request(num_prompt_tokens=1000), snapshot(*workers, w1=40), AUTO)
    assert isinstance(outcome, Choice)
    assert (outcome.path.prefill or outcome.path.decode).address.worker_id == "w1"
    assert outcome.path.num_cached_tokens == 640
    assert outcome.reason is Reason.CACHED_PREFIX


def test_a_longer_queue_than_the_prefix_saves_sends_it_elsewhere() -> None:
    def worker_for(queued: int) -> str:
        busy = make_candidate("u1", U, queued_prompt_tokens=queued)
        return chosen(
            decide(make_request(num_prompt_tokens=1000), snapshot(make_candidate("u0", U), busy, u1=40), AUTO)
        )

    assert worker_for(1000) == "local:u1"
    assert worker_for(1500) == "local:u0"


def test_what_the_decode_worker_holds_need_not_be_moved() -> None:
    workers = [make_candidate("p0", P), make_candidate("d0", D), make_candidate("d1", D, num_placed=9)]
    outcome = decide(make_request(num_prompt_tokens=1000), snapshot(*workers, d1=40), AUTO)
    assert chosen(outcome) == "split:p0>d1"
    assert isinstance(outcome, Choice) and outcome.path.num_cached_tokens == 0, "it is computed all the same"


def test_a_prompt_that_is_wholly_cached_leaves_a_token_to_compute() -> None:
    outcome = decide(make_request(num_prompt_tokens=160), snapshot(make_candidate("u0", U), u0=10), AUTO)
    assert isinstance(outcome, Choice) and outcome.path.num_cached_tokens == 159


def test_the_prefix_is_no_reason_where_the_load_had_chosen_the_same() -> None:
    workers = [make_candidate("u0", U), make_candidate("u1", U, queued_prompt_tokens=500)]
    outcome = decide(make_request(num_prompt_tokens=500), snapshot(*workers, u0=10), AUTO)
    assert isinstance(outcome, Choice) and outcome.reason is Reason.LEAST_LOADED


def test_a_worker_that_came_back_is_tried_although_another_seems_a_little_cheaper() -> None:
    """What it costs is guessed; while the other one is idle it would never be known."""

    def pick(*workers: Candidate, **overlaps: int) -> Choice:
        outcome = decide(make_request(num_prompt_tokens=1000), snapshot(*workers, **overlaps), AUTO)
        assert isinstance(outcome, Choice)
        return outcome

    known = make_candidate("p1", P, num_placed=50)
    decode = make_candidate("d0", D, num_placed=50)
    little, much = (make_candidate("p0", P, queued_prompt_tokens=queued) for queued in (100, 2000))
    back = replace(little, num_placed=1)
    assert chosen(pick(little, known, decode)) == "split:p0>d0"
    assert pick(little, known, decode).reason is Reason.LEAST_USED
    assert chosen(pick(back, known, decode)) == "split:p1>d0", "it was tried"
    assert chosen(pick(much, known, decode)) == "split:p1>d0", "it has too much to do"
    assert chosen(pick(little, known, decode, p1=30)) == "split:p1>d0", "the other one holds what was asked"


def test_round_robin_takes_turns_whatever_is_held_and_queued() -> None:
    settings = PolicySettings(policy="round_robin")
    placed = Counter[str]()
    for _ in range(12):
        workers = [make_candidate(f"u{i}", U, num_placed=placed[f"u{i}"], queued_prompt_tokens=i) for i in range(4)]
        outcome = decide(make_request(num_prompt_tokens=500), snapshot(*workers, u2=30), settings)
        assert isinstance(outcome, Choice) and outcome.reason is Reason.ROUND_ROBIN
        placed[outcome.path.decode.address.worker_id] += 1
    assert set(placed.values()) == {3}


def test_a_model_without_a_path_says_why() -> None:
    assert lack_of_path(MODEL, snapshot(make_candidate("u0", U)), AUTO) == ""
    assert "no ready decode worker" in lack_of_path(MODEL, snapshot(make_candidate("p0", P)), AUTO)


# -- law 6 ------------------------------------------------------------------------------------------------------------

workers_st = st.builds(
    make_candidate,
    st.sampled_from([f"w{i}" for i in range(6)]),
    st.sampled_from(list(Role)),
    incarnation=st.integers(1, 2),
    state=st.sampled_from(list(WorkerState)),
    model=st.sampled_from([MODEL, "other"]),
    format_hash=st.sampled_from(["f0", "f1"]),
    revision=st.sampled_from(["", "r1"]),
    num_blocks=st.integers(1, 60),
    used_blocks=st.integers(0, 80),
    queued_prompt_tokens=st.integers(0, 5000),
    num_requests=st.integers(0, 20),
    num_placed=st.integers(0, 3),
)
cells_st = st.lists(workers_st, max_size=6, unique_by=lambda c: c.address.worker_id)
names_st = st.sampled_from([f"w{i}" for i in range(6)])
requests_st = st.builds(
    make_request,
    num_prompt_tokens=st.integers(1, 1200),
    excluded_workers=st.lists(st.tuples(names_st, st.integers(1, 2)), max_size=3).map(tuple),
    excluded_pairs=st.lists(st.tuples(names_st, names_st), max_size=3).map(tuple),
)
settings_st = st.builds(PolicySettings, mode=st.sampled_from(["auto", "split", "local"]))


@given(cell=cells_st, request=requests_st, settings=settings_st)
def test_no_unusable_worker_is_ever_picked(
    cell: list[Candidate], request: PlaceRequest, settings: PolicySettings
) -> None:
    outcome = decide(request, snapshot(*cell), settings)
    if isinstance(outcome, Shortfall):
        assert outcome.message
        return
    for path in [outcome.path, outcome.runner_up]:
        if path is None:
            continue
        for worker in [w for w in (path.prefill, path.decode) if w is not None]:
            assert worker.state is WorkerState.READY
            assert worker.model == MODEL
            key = (worker.address.worker_id, worker.address.incarnation)
            assert key not in request.excluded_workers
            assert worker.num_blocks * 16 > request.num_prompt_tokens
        if path.mode is Mode.SPLIT:
            assert path.prefill is not None
            assert path.prefill.role is Role.PREFILL and path.decode.role is Role.DECODE
            assert path.prefill.pairing == path.decode.pairing
            prefill, decode = path.prefill.address, path.decode.address
            pair = (prefill.worker_id, prefill.incarnation, decode.worker_id, decode.incarnation)
            assert pair not in request.excluded_pairs or (
                settings.mode == "split" and outcome.reason is Reason.ONLY_PAIR_LEFT
            )
        else:
            assert path.prefill is None and path.decode.role in (Role.DECODE, Role.UNIFIED)


@given(cell=cells_st, request=requests_st)
def test_a_path_is_found_whenever_a_ready_pair_with_equal_formats_exists(
    cell: list[Candidate], request: PlaceRequest
) -> None:
    outcome = decide(request, snapshot(*cell), AUTO)
    fit = [
        c
        for c in cell
        if c.state is WorkerState.READY
        and c.model == MODEL
        and c.num_blocks * 16 > request.num_prompt_tokens
        and (c.address.worker_id, c.address.incarnation) not in request.excluded_workers
    ]
    pairs = [(p, d) for p in fit for d in fit if (p.role, d.role) == (P, D) and p.pairing == d.pairing]
    if pairs or any(c.role is Role.UNIFIED for c in fit):
        assert isinstance(outcome, Choice)


@given(cell=cells_st, request=requests_st, settings=settings_st)
def test_a_decision_depends_on_the_snapshot_alone(
    cell: list[Candidate], request: PlaceRequest, settings: PolicySettings
) -> None:
    forward = decide(request, snapshot(*cell), settings)
    backward = decide(request, snapshot(*reversed(cell)), settings)
    if isinstance(forward, Choice):
        assert isinstance(backward, Choice) and str(backward.path) == str(forward.path)
    else:
        assert isinstance(backward, Shortfall) and backward.lack is forward.lack


def test_a_pair_that_its_decode_worker_reports_as_broken_is_avoided_by_every_request() -> None:
    broken = frozenset({("p0", make_candidate("p0", P).address.incarnation)})
    workers = [make_candidate("p0", P), make_candidate("p1", P, num_placed=9), make_candidate("d0", D)]
    workers[2] = replace(workers[2], broken_pairs=broken)
    assert chosen(decide(make_request(), snapshot(*workers), AUTO)) == "split:p1>d0"
    outcome = decide(make_request(), snapshot(workers[0], workers[2]), AUTO)
    assert chosen(outcome) == "local:d0" and isinstance(outcome, Choice) and outcome.reason is Reason.PAIR_BROKEN
    denied = decide(make_request(), snapshot(workers[0], workers[2]), PolicySettings(fallback="deny"))
    assert chosen(denied) == "split:p0>d0", "there is nothing else"


def test_a_restarted_worker_is_no_longer_part_of_a_broken_pair() -> None:
    new = make_candidate("p0", P)
    old = (new.address.worker_id, new.address.incarnation + 1)
    decode = replace(make_candidate("d0", D), broken_pairs=frozenset({old}))
    assert chosen(decide(make_request(), snapshot(new, decode), AUTO)) == "split:p0>d0"
