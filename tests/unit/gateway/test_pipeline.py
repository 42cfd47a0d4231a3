"""A request through the scripted cluster: every way to end, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import gateway.ends
import gateway.token_streams
from core import types as t
from core.clock import ManualClock, MonotonicClock
from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LeaseExpired,
    NoWorker,
    OutOfBlocks,
    QueueFull,
    ServingError,
    TransferStalled,
    WorkerDraining,
    WorkerLost,
)
from core.ids import GatewayId, HandoffId, Incarnation, PlacementId, WorkerId, new_request_id
from gateway.attempt import Attempt
from gateway.legs import Peers
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.run import MAX_HISTORY, MAX_MESSAGE, Branch, Choice, Run
from gateway.stages import StageClock
from gateway.text import ChoiceText, TextDelta, TextRules
from gateway.token_streams import TokenStreams
from tests.support.scripted import Fault, Script, ScriptedCluster
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer

TEXT = "hello world"
STEPS = [[one] for one in ids_of(TEXT)]
LOST = WorkerLost("scripted", worker_id="decode-0")


class Rig:
    """One gateway's pipeline over a scripted cluster."""

    def __init__(self, script: Script) -> None:
        self.cluster = ScriptedCluster(script)
        streams = TokenStreams(self.cluster, GatewayId("g"), Incarnation(7), MonotonicClock())
        self.peers = Peers(self.cluster, streams)
        limits = PipelineLimits(max_attempts=3, capacity_patience_s=0.2)
        self.runs: list[Run] = []
        self.deltas: dict[str, list[list[TextDelta]]] = {}
        self.pipeline = Pipeline(self.cluster, self.peers, limits)

    def run(self, *, rules: TextRules | None = None, deadline_s: float = 20.0, n: int = 1) -> Run:
        request = t.GenerateRequest(
            request_id=new_request_id(),
            model="m",
            prompt_token_ids=(5, 6, 7),
            sampling=t.SamplingParams(max_tokens=64, seed=3, n=n),
            choices=tuple(t.ChoiceProgress(choice=number) for number in range(n)),
            gateway_id=GatewayId("g"),
            gateway_incarnation=Incarnation(7),
            deadline_s=deadline_s,
        )
        deltas: list[list[TextDelta]] = [[] for _ in range(n)]
        choices = [
            Choice(number, ChoiceText(tiny_tokenizer(), rules or TextRules()), deltas[number].append)
            for number in range(n)
        ]
        run = Run(request, choices, StageClock(MonotonicClock()))
        self.runs.append(run)
        self.deltas[run.request.request_id] = deltas
        return run

    def sent(self, run: Run, choice: int = 0) -> str:
        """The text of a choice that was handed on so far."""
        return "".join(delta.text for delta in self.deltas[run.request.request_id][choice])

    async def text(self, run: Run) -> str:
        await self.pipeline.generate(run)
        return self.sent(run)

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.outcome]

    @property
    def num_attempts(self) -> int:
        return len(self.cluster.places)


@asynccontextmanager
async def rig(script: Script | None = None) -> AsyncIterator[Rig]:
    """The rig, and law 2 at its end: every placement was ended and no task is left."""
    before = asyncio.all_tasks()
    one = Rig(script or Script(steps=STEPS))
    yield one
    await one.peers.drain(1.0)
    placed = {f"{place.request_id}-{place.attempt}" for place in one.cluster.places}
    refused = {f"{p.request_id}-{p.attempt}" for p in one.cluster.places if one.cluster.fault(p.attempt).on_place}
    assert {end.placement_id for end in one.cluster.ends} >= placed - refused - one_unplaced(one)
    await one.peers.close()
    await one.cluster.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def one_unplaced(one: Rig) -> set[str]:
    """The last placement, where the run ended while the router was deciding."""
    last = {f"{run.request.request_id}-{run.attempt}": run.last_placement for run in one.ended}
    return {name for name, placement in last.items() if placement is None or placement.placement_id != name}


@pytest.mark.parametrize("mode", list(t.Mode))
@pytest.mark.parametrize("size", [1, 2, 5, 11])
async def test_the_answer_is_the_same_in_both_modes_and_any_grouping(mode: t.Mode, size: int) -> None:
    ids = ids_of(TEXT)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    async with rig(Script(steps=steps, mode=mode)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert (run.choices[0].finish_reason, run.outcome, run.choices[0].accepted) == (
            t.FinishReason.LENGTH,
            "length",
            ids,
        )
        await r.peers.drain(1.0)
        assert [end.outcome for end in r.cluster.ends] == ["ok"]
        assert r.cluster.aborts == []


async def test_a_finish_without_tokens_ends_the_answer_once() -> None:
    async with rig(Script(steps=STEPS, finish_alone=True, finish_reason=t.FinishReason.STOP)) as r:
        run = r.run()
        await r.text(run)
        reasons = [delta.finish_reason for delta in r.deltas[run.request.request_id][0]]
        assert [reason for reason in reasons if reason] == [t.FinishReason.STOP]
        assert reasons[-1] is t.FinishReason.STOP


async def test_token_1_waits_for_d_and_not_for_the_transfer() -> None:
    async with rig(Script(steps=STEPS, faults={1: Fault(is_queued=True)})) as r:
        r.cluster.hold("accept")
        r.cluster.hold("token-0")
        run = r.run()
        answer = asyncio.ensure_future(r.text(run))
        await r.cluster.until("accept")
        assert r.sent(run) == ""
        r.cluster.release("accept")
        await r.cluster.until("token-0")
        assert r.sent(run) == "h"  # D's own tokens are still held at the gate
        r.cluster.release("token-0")
        assert await answer == TEXT


async def test_a_request_that_ends_at_token_1_ends_without_d() -> None:
    async with rig(Script(steps=[ids_of("h")])) as r:
        r.cluster.hold("admit")
        assert await r.text(r.run()) == "h"
        await r.peers.drain(1.0)
        assert ("decode", 1, "finished") in r.cluster.aborts


@pytest.mark.parametrize(("steps", "num_attempts"), [([ids_of("h")], 1), (STEPS, 2)], ids=["over", "not over"])
async def test_ds_word_that_nothing_is_handed_off_may_overtake_ps_last_token(
    steps: list[list[int]], num_attempts: int
) -> None:
    async with rig(Script(steps=steps, faults={1: Fault(on_admit=Cancelled("it ended at its first token"))})) as r:
        r.cluster.hold("prefill")
        answer = asyncio.ensure_future(r.text(r.run()))
        await r.cluster.until("prefill")
        await r.cluster.until("admit")
        for _ in range(5):
            await asyncio.sleep(0)  # D's word arrives
        assert not answer.done()
        r.cluster.release("prefill")
        assert await answer == "".join(TEXT[: sum(map(len, steps))])
        assert r.num_attempts == num_attempts


async def test_what_was_held_and_is_cancelled_while_another_place_is_sought_costs_an_attempt_and_no_more() -> None:
    fault = Fault(on_admit=WorkerLost("d", worker_id="decode-0"), on_prefill=Cancelled("gone"))
    async with rig(Script(steps=STEPS, faults={1: fault}, num_decodes=2)) as r:
        r.cluster.hold("prefill")
        answer = asyncio.ensure_future(r.text(r.run()))
        await r.cluster.until("prefill")
        r.cluster.hold("place")
        while r.num_attempts < 2:
            await asyncio.sleep(0)
        r.cluster.release("prefill")
        for _ in range(5):
            await asyncio.sleep(0)  # the call to P fails: nobody hears it yet
        r.cluster.release("place")
        assert await answer == TEXT
        assert r.num_attempts == 3


async def test_a_stop_string_ends_both_legs() -> None:
    async with rig() as r:
        run = r.run(rules=TextRules(stop=("o w",)))
        assert await r.text(run) == "hell"
        await r.peers.drain(1.0)
        assert run.outcome == "stop"
        assert {leg for leg, _, _ in r.cluster.aborts} == {"decode", "prefill"}


FAULTS = {
    "prefill lost": Fault(on_prefill=WorkerLost("p", worker_id="prefill-0")),
    "decode refuses by death": Fault(on_admit=LOST),
    "internal error at D": Fault(on_admit=InternalError("x", worker_id="decode-0")),
    "transfer stalls": Fault(fail_at=1, error=TransferStalled("slow")),
    "D fails at once": Fault(fail_at=0),
    "D fails in mid-answer": Fault(fail_at=5),
    "stream breaks at once": Fault(break_stream_at=0),
    "stream breaks in mid-answer": Fault(break_stream_at=4),
    "a token is missing": Fault(skip_at=3),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("mode", list(t.Mode))
async def test_a_failed_attempt_is_continued_to_the_same_answer(fault: Fault, mode: t.Mode) -> None:
    if fault.on_prefill:
        mode = t.Mode.SPLIT
    async with rig(Script(steps=STEPS, mode=mode, faults={1: fault}, num_decodes=2)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert (run.attempt, run.choices[0].accepted) == (2, ids_of(TEXT))
        await r.peers.drain(1.0)
        assert sorted(leg for leg, attempt, _ in r.cluster.aborts if attempt == 1)[0] == "decode"
        assert sorted((end.attempt, end.outcome == "ok") for end in r.cluster.ends) == [(1, False), (2, True)]


HELD = {name: FAULTS[name] for name in ("decode refuses by death", "D fails at once", "stream breaks at once")} | {
    "a transfer stalls at once": Fault(fail_at=0, error=TransferStalled("slow")),
    "D has no room": Fault(on_admit=QueueFull("full", worker_id="decode-0")),
}


@pytest.mark.parametrize("fault", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_held_when_d_fails_is_fetched_by_another_and_not_computed_again(fault: Fault, n: int) -> None:
    """Also when the choices have come apart by their first tokens: one hand-off has them all."""
    async with rig(three(faults={1: fault}, num_decodes=2) if n > 1 else Script(steps=STEPS, faults={1: fault})) as r:
        r.cluster.incarnations["decode-1"] = 2
        run = r.run(n=n)
        assert await r.text(run) == TEXT
        assert [r.sent(run, choice) for choice in range(1, n)] == list(OTHERS[: n - 1])
        assert len(r.cluster.prefills) == 1 and run.attempt == 2
        held = r.cluster.places[1].held
        assert held is not None and (held.handoff_id, held.holder.worker_id) == (r.cluster.prefills[0], "prefill-0")
        assert {progress.accepted for one in r.cluster.requests for progress in one.choices} == {()}
        await r.peers.drain(1.0)
        assert not [leg for leg, _, _ in r.cluster.aborts if leg == "prefill"], "nothing is left to give back"


@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_held_no_more_is_computed_again(n: int) -> None:
    script = three(faults={1: Fault(fail_at=0)}) if n > 1 else Script(steps=STEPS, faults={1: Fault(fail_at=0)})
    script.holds, script.num_decodes = False, 2
    async with rig(script) as r:
        run = r.run(n=n)
        assert await r.text(run) == TEXT
        assert [r.sent(run, choice) for choice in range(1, n)] == list(OTHERS[: n - 1])
        assert r.cluster.places[1].held is not None
        assert ("prefill", 1, "placed anew") in r.cluster.aborts


async def test_a_lease_that_is_over_when_it_is_claimed_costs_no_attempt() -> None:
    faults = {1: Fault(fail_at=0), 2: Fault(fail_at=0, error=LeaseExpired("over")), 3: Fault(fail_at=4)}
    async with rig(Script(steps=STEPS, faults=faults, num_decodes=3)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert run.attempt == 4
        assert [place.held is not None for place in r.cluster.places] == [False, True, False, False]


@pytest.mark.parametrize("state", ["place", "admit", "token-0"])
async def test_what_is_held_is_given_back_when_the_client_leaves(state: str) -> None:
    async with rig(Script(steps=STEPS, faults={1: Fault(fail_at=0)}, num_decodes=2)) as r:
        run = r.run()
        answer = asyncio.ensure_future(r.text(run))
        while len(r.cluster.requests) < 1 or not r.cluster.prefills:
            await asyncio.sleep(0)
        r.cluster.reached.pop(state, None)
        r.cluster.hold(state)
        await r.cluster.until(state)
        answer.cancel()
        await asyncio.wait({answer})
        await r.peers.drain(1.0)
        assert len(r.cluster.prefills) == 1
        assert [one for one in r.cluster.aborts if one[0] == "prefill"] == [("prefill", 1, "cancelled")]


async def test_a_retry_carries_accepted_tokens_whose_text_is_held_back() -> None:
    async with rig(Script(steps=STEPS, faults={1: Fault(fail_at=4)}, num_decodes=2)) as r:
        run = r.run(rules=TextRules(stop=("ello!",)))
        assert await r.text(run) == TEXT
        retry = r.cluster.requests[-1]
        assert retry.attempt == 2
        assert retry.choices == (t.ChoiceProgress(choice=0, accepted=tuple(ids_of("hell"))),)
        assert retry.prompt_token_ids == run.request.prompt_token_ids
        assert retry.sampling == run.request.sampling
        assert r.cluster.places[-1].num_prompt_tokens == 3 + 4
        assert r.cluster.places[-1].max_new_tokens == 64 - 4


async def test_the_blamed_worker_or_pair_is_avoided() -> None:
    faults = {1: Fault(on_admit=LOST), 2: Fault(fail_at=1, error=TransferStalled("slow", worker_id="decode-1"))}
    async with rig(Script(steps=STEPS, faults=faults, num_decodes=2)) as r:
        assert await r.text(r.run()) == TEXT
        assert r.cluster.places[1].excluded_workers == (("decode-0", 1),)
        assert r.cluster.places[2].excluded_pairs == (("prefill-0", 9, "decode-1", 2),)


async def test_repeated_tokens_are_accepted_once() -> None:
    async with rig(Script(steps=STEPS, faults={1: Fault(fail_at=6), 2: Fault(repeat_from=2)}, num_decodes=2)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert run.choices[0].accepted == ids_of(TEXT)


async def test_the_attempt_budget_ends_in_the_last_typed_error() -> None:
    async with rig(Script(steps=STEPS, faults={n: Fault(fail_at=n) for n in range(1, 9)}, num_decodes=9)) as r:
        with pytest.raises(WorkerLost):
            await r.text(r.run())
        assert r.num_attempts == 3


async def test_workers_that_drain_one_after_the_other_cost_no_attempt_and_are_avoided() -> None:
    faults = {n: Fault(fail_at=n, error=WorkerDraining("drained", worker_id=f"decode-{n - 1}")) for n in range(1, 6)}
    async with rig(Script(steps=STEPS, faults=faults, num_decodes=6)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert (run.attempt, run.choices[0].accepted) == (6, ids_of(TEXT))
        assert [name for name, _ in r.cluster.places[-1].excluded_workers] == [f"decode-{n}" for n in range(5)]


async def test_a_refusal_for_room_costs_no_attempt_and_carries_the_age() -> None:
    faults = {n: Fault(on_admit=OutOfBlocks("full")) for n in range(1, 4)}
    async with rig(Script(steps=STEPS, faults=faults)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert run.attempt == 4
        ages = [place.age_s for place in r.cluster.places]
        assert ages == sorted(ages)
        assert ages[-1] > ages[0]
        assert r.cluster.places[-1].excluded_workers == ()


async def test_refusals_for_room_are_borne_for_a_bounded_time() -> None:
    faults = {n: Fault(on_admit=QueueFull("full")) for n in range(1, 100)}
    async with rig(Script(steps=STEPS, faults=faults)) as r:
        with pytest.raises(QueueFull):
            await r.text(r.run())


def test_the_patience_with_refusals_begins_anew_once_a_token_came() -> None:
    clock = ManualClock()
    request = Rig(Script(steps=STEPS)).run().request
    run = Run(request, [Choice(0, ChoiceText(tiny_tokenizer(), TextRules()))], StageClock(clock))
    branch = Branch(choices=run.choices)
    assert run.refused_for_s(branch) == 0
    clock.advance(50)
    assert run.refused_for_s(branch) == 50
    address = t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address="d:1")
    placement = t.Placement(placement_id=PlacementId("p"), handoff_id=HandoffId("h"), mode=t.Mode.LOCAL, decode=address)
    Attempt(run, branch, 2, placement).take(
        t.TokenChunk(request_id=request.request_id, choice=0, attempt=2, first_index=0, token_ids=(STEPS[0][0],))
    )
    clock.advance(50)
    assert run.refused_for_s(branch) == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(on_place=NoWorker("none")), NoWorker),
        (Fault(on_place=QueueFull("router full")), QueueFull),
        (Fault(on_admit=InvalidRequest("bad")), InvalidRequest),
        (Fault(on_prefill=InvalidRequest("bad")), InvalidRequest),
        (Fault(fail_at=2, error=InvalidRequest("bad")), InvalidRequest),
    ],
)
async def test_an_error_that_no_retry_mends_ends_the_request(fault: Fault, error: type[ServingError]) -> None:
    async with rig(Script(steps=STEPS, faults={1: fault})) as r:
        run = r.run()
        with pytest.raises(error):
            await r.text(run)
        assert (r.num_attempts, run.outcome) == (1, error.slug)


async def test_a_router_that_restarts_is_waited_for() -> None:
    gone = WorkerLost("router is not reachable", worker_id="router")
    async with rig() as r:
        place, calls = r.cluster.place, 0

        async def flaky(request: t.PlaceRequest) -> t.Placement:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise gone
            return await place(request)

        r.cluster.place = flaky  # type: ignore[method-assign]
        run = r.run()
        assert await r.text(run) == TEXT
        assert (calls, run.attempt) == (3, 1)


STATES = ["place", "outputs", "admit", "prefill", "token-0", "token-5"]


@pytest.mark.parametrize("state", STATES[1:])  # the call to the router carries the deadline itself
async def test_the_deadline_ends_a_request_in_every_state(state: str) -> None:
    async with rig() as r:
        r.cluster.hold(state)
        run = r.run(deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await r.text(run)
        assert run.outcome == "deadline_exceeded"


async def cancel_task(rig_: Rig, run: Run, state: str) -> None:
    task = asyncio.ensure_future(rig_.text(run))
    await rig_.cluster.until(state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_may_be_cancelled_in_every_state(state: str, n: int) -> None:
    async with rig() as r:
        r.cluster.hold(state)
        run = r.run(n=n)
        await cancel_task(r, run, state)
        assert (run.outcome, run.choices[0].finish_reason) == ("cancelled", None)
        assert [one.outcome for one in r.ended] == ["cancelled"]
        if run.last_placement is not None:
            await r.peers.drain(1.0)
            assert {leg for leg, _, reason in r.cluster.aborts if reason == "cancelled"} == {"decode", "prefill"}


async def test_tokens_of_an_attempt_that_nobody_waits_for_are_dropped_and_aborted_once() -> None:
    async with rig() as r:
        assert await r.text(r.run()) == TEXT
        stray = t.TokenChunk(request_id=new_request_id(), choice=0, attempt=4, first_index=0, token_ids=(1,))
        queue = r.cluster.streams["decode-0", 1]
        queue.put_nowait(t.StepOutputs(chunks=(stray,)))
        queue.put_nowait(t.StepOutputs(chunks=(stray,)))
        assert await r.text(r.run()) == TEXT
        assert [(leg, attempt) for leg, attempt, reason in r.cluster.aborts if reason == "unknown"] == [("decode", 4)]


async def test_one_stream_serves_all_requests_of_a_worker_and_its_break_fails_them_all() -> None:
    async with rig(Script(steps=STEPS, num_decodes=2)) as r:
        r.cluster.hold("token-3")
        runs = [r.run() for _ in range(5)]
        answers = [asyncio.ensure_future(r.text(run)) for run in runs]
        await r.cluster.until("token-3")
        assert list(r.cluster.streams) == [("decode-0", 1)]
        r.cluster.streams["decode-0", 1].put_nowait(LOST)
        r.cluster.release("token-3")
        assert await asyncio.gather(*answers) == [TEXT] * 5
        assert {run.attempt for run in runs} == {2}


@pytest.mark.parametrize("fault", [Fault(), Fault(fail_at=4), Fault(on_prefill=WorkerLost("p"))])
async def test_stages_partition_the_time_of_a_request(fault: Fault) -> None:
    async with rig(Script(steps=STEPS, faults={1: fault}, num_decodes=2)) as r:
        run = r.run()
        await r.text(run)
        record = run.record()
        assert sum(seconds for _, seconds in record.stages) == pytest.approx(record.duration_s, abs=1e-6)
        assert all(seconds >= 0 for _, seconds in record.stages)
        assert record.ttft_s <= record.duration_s and _is_gapless(record)
        assert record.num_completion_tokens == len(TEXT)


@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_the_wait_for_the_kv_is_divided_by_what_d_measured_and_the_rest_is_network(is_overtaken: bool) -> None:
    """Overtaken: D's word that the KV is there came before P's answer, and ended the wait for both."""
    run, clock = Rig(Script(steps=STEPS)).run(), ManualClock()
    run.stages = StageClock(clock)
    number = run.begin_attempt(branch := Branch(choices=run.choices))
    address = t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address="d:1")
    holder = replace(address, worker_id=WorkerId("p"))
    ids = {"placement_id": PlacementId("p"), "handoff_id": HandoffId("h")}
    placement = t.Placement(**ids, mode=t.Mode.SPLIT, decode=address, prefill=holder, queue_s=0.25)
    clock.advance(0.5)
    run.begin(branch, placement)
    attempt = Attempt(run, branch, number, placement)

    def first_chunk(**ended: Any) -> t.TokenChunk:
        return t.TokenChunk(
            request_id=run.request.request_id,
            choice=0,
            attempt=number,
            first_index=0,
            token_ids=(STEPS[0][0],),
            **ended,
        )

    attempt.take(t.AdmitReply(verdict=t.AdmitVerdict.ACCEPTED))
    told = first_chunk(stages=t.StageTimes(transfer_s=0.25, transfer_backend="nixl"))
    first = t.FirstToken(choice=0, index=0, token_id=STEPS[0][0])
    reply = t.PrefillReply(
        first_tokens=(first,), num_cached_tokens=0, stages=t.StageTimes(prefill_queue_s=0.125, prefill_s=0.5)
    )
    for event in (told, reply) if is_overtaken else (reply, told):
        clock.advance(1.0)
        attempt.take(event)
    clock.advance(2.0)
    ended = t.StageTimes(transfer_s=0.25, decode_queue_s=0.5, decode_s=1.0, delivery_s=0.25, transfer_backend="nixl")
    last = first_chunk(stages=ended, finish_reason=t.FinishReason.STOP)
    attempt.take(replace(last, first_index=1))
    clock.advance(0.5)
    run.close(is_sent=True)
    assert dict(run.stages.stages()) == {
        "route_queue": 0.25,
        "route": 0.25,
        "prefill_queue": 0.125,
        "prefill": 0.5,
        "transfer": 0.25,
        "network": 1.375,
        "decode_queue": 0.5,
        "decode": 1.0,
        "delivery": 0.25 + 0.5,
    }
    record = run.record()
    assert record.duration_s == 5.0 and _is_gapless(record)
    whose = {one.stage: one.worker for one in record.timeline}
    assert whose["prefill"] == "p" and whose["transfer"] == whose["decode"] == "d" and not whose["network"]


def _is_gapless(record: t.RequestRecord) -> bool:
    ends = [0.0, *(one.start_s + one.duration_s for one in record.timeline)]
    starts = [one.start_s for one in record.timeline]
    return starts == pytest.approx(ends[:-1], abs=1e-9) and ends[-1] == pytest.approx(record.duration_s, abs=1e-9)


async def test_a_stop_given_as_a_special_tokens_text_is_a_stop_id_and_shows_its_reason() -> None:
    eos = tiny_tokenizer().added_id(EOS_TEXT)
    script = Script(steps=[*STEPS, [eos or 0]], finish_reason=t.FinishReason.STOP, stop_token_id=eos)
    async with rig(script) as r:
        assert await r.text(r.run(rules=TextRules(stop=(EOS_TEXT,)))) == TEXT


async def test_a_worker_that_opens_no_token_stream_is_lost_to_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.token_streams, "OPEN_TIMEOUT_S", 0.01)
    async with rig(Script(steps=STEPS, num_decodes=2)) as r:
        r.cluster.hold("outputs-decode-0")
        assert await r.text(r.run()) == TEXT
        assert r.cluster.places[1].excluded_workers == (("decode-0", 1),)


async def test_a_call_that_times_out_before_the_deadline_is_retried() -> None:
    faults = {1: Fault(on_admit=DeadlineExceeded("decode-0 did not answer in time", worker_id="decode-0"))}
    async with rig(Script(steps=STEPS, faults=faults, num_decodes=2)) as r:
        assert await r.text(r.run()) == TEXT
        assert r.num_attempts == 2


async def test_the_abort_of_an_old_attempt_leaves_the_restarted_prefill_workers_client_alone() -> None:
    async with rig(Script(steps=STEPS)) as r:
        r.cluster.hold("token-2")
        old = asyncio.ensure_future(r.text(r.run()))
        await r.cluster.until("token-2")
        r.cluster.prefill_incarnation = 10
        run = r.run()
        new = asyncio.ensure_future(r.text(run))
        while not r.sent(run):
            await asyncio.sleep(0)
        old.cancel()  # its client left: both legs are aborted
        await asyncio.wait({old})
        await r.peers.drain(1.0)
        assert ("prefill", 1, "cancelled") in r.cluster.aborts
        assert 10 not in r.cluster.closed_prefills
        r.cluster.release("token-2")
        assert await new == TEXT


async def test_a_call_that_breaks_in_an_unforeseen_way_is_an_error_and_not_a_wait() -> None:
    broken = Fault(on_prefill=KeyError("a field of a newer peer"))  # type: ignore[arg-type]
    async with rig(Script(steps=STEPS, faults={1: broken})) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        assert run.attempt == 2


# -- several choices ------------------------------------------------------------------------------------------------

OTHERS = ("well, hello", "o")


def three(**more: Any) -> Script:
    return Script(steps=STEPS, others=[[[one] for one in ids_of(text)] for text in OTHERS], **more)


@pytest.mark.parametrize("mode", list(t.Mode))
async def test_several_choices_share_one_attempt(mode: t.Mode) -> None:
    async with rig(three(mode=mode)) as r:
        run = r.run(n=3)
        assert await r.text(run) == TEXT
        assert [r.sent(run, choice) for choice in (1, 2)] == list(OTHERS)
        assert [one.choices for one in r.cluster.requests] == [tuple(t.ChoiceProgress(choice=n) for n in range(3))]
        assert (run.attempt, run.outcome, run.num_completion_tokens) == (1, "length", len(TEXT + "".join(OTHERS)))
        await r.peers.drain(1.0)
        assert (r.cluster.aborts, r.cluster.unread) == ([], [])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("mode", list(t.Mode))
async def test_choices_of_a_failed_attempt_go_on_behind_what_each_has_accepted(fault: Fault, mode: t.Mode) -> None:
    if fault.on_prefill:
        mode = t.Mode.SPLIT
    async with rig(three(mode=mode, faults={1: fault}, num_decodes=2)) as r:
        run = r.run(n=3)
        assert await r.text(run) == TEXT
        assert [r.sent(run, choice) for choice in (1, 2)] == list(OTHERS)
        assert [choice.accepted for choice in run.choices] == [ids_of(text) for text in (TEXT, *OTHERS)]
        numbers = [(one.attempt, progress.choice) for one in r.cluster.requests for progress in one.choices]
        assert len(set(numbers)) == len(numbers), "each branch has attempts of its own"
        await r.peers.drain(1.0)
        assert {end.attempt for end in r.cluster.ends if end.outcome == "ok"} == set(range(2, run.attempt + 1))


async def test_choices_that_have_come_apart_resume_separately_and_equal_ones_together() -> None:
    script = Script(steps=STEPS, others=[STEPS, [[one] for one in ids_of("well")]], faults={1: Fault(fail_at=2)})
    script.num_decodes = 2
    async with rig(script) as r:
        run = r.run(n=3)
        assert await r.text(run) == TEXT
        again = [one.choices for one in r.cluster.requests if one.attempt > 1]
        assert again == [
            tuple(t.ChoiceProgress(choice=n, accepted=tuple(ids_of("he"))) for n in (0, 1)),
            (t.ChoiceProgress(choice=2, accepted=tuple(ids_of("we"))),),
        ]


async def test_a_choice_fails_as_often_as_a_request_of_its_own_might() -> None:
    async with rig(three(faults={n: Fault(fail_at=n) for n in range(1, 30)}, num_decodes=9)) as r:
        run = r.run(n=3)
        with pytest.raises(WorkerLost):
            await r.text(run)
        assert run.attempt <= 1 + 2 * 3
        assert run.outcome == "worker_lost"


async def test_a_choice_that_ends_by_a_stop_string_is_given_up_alone() -> None:
    async with rig(three()) as r:
        r.cluster.hold("token-4")
        run = r.run(n=3, rules=TextRules(stop=("el",)))
        answer = asyncio.ensure_future(r.text(run))
        await r.cluster.until("token-4")
        while not r.cluster.unread:
            await asyncio.sleep(0)
        r.cluster.release("token-4")
        assert await answer == "h"
        assert [r.sent(run, choice) for choice in (1, 2)] == ["w", "o"]
        await r.peers.drain(1.0)
        assert r.cluster.unread == [0], "the others ended by then, and the whole attempt is given up"
        assert ("decode", 1, "finished") in r.cluster.aborts
        assert [choice.accepted for choice in run.choices] == [ids_of(text) for text in ("hel", "wel", "o")]


async def test_a_choice_nobody_asked_for_is_an_error_and_not_an_answer() -> None:
    async with rig(Script(steps=STEPS, num_decodes=2)) as r:
        r.cluster.hold("token-3")
        run = r.run()
        answer = asyncio.ensure_future(r.text(run))
        await r.cluster.until("token-3")
        stray = t.TokenChunk(
            request_id=run.request.request_id, choice=5, attempt=1, first_index=0, token_ids=(STEPS[0][0],)
        )
        r.cluster.streams["decode-0", 1].put_nowait(t.StepOutputs(chunks=(stray,)))
        r.cluster.release("token-3")
        assert await answer == TEXT


async def test_what_breaks_in_one_attempt_is_its_own_end_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(Script(steps=STEPS, mode=t.Mode.LOCAL)) as r:
        r.cluster.hold("token-3")
        bad, good = r.run(), r.run()
        answers = [asyncio.ensure_future(r.text(run)) for run in (bad, good)]
        await r.cluster.until("token-3")

        def break_down(delta: TextDelta) -> None:
            raise ZeroDivisionError

        bad.choices[0].sink = break_down
        r.cluster.release("token-3")
        assert await answers[1] == TEXT
        with pytest.raises(ZeroDivisionError):
            await answers[0]
        assert (bad.outcome, good.attempt) == ("internal_error", 1)


async def test_ends_are_told_with_the_next_placing_or_soon_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.ends, "FLUSH_S", 0.5)
    async with rig() as r:
        first, second = r.run(), r.run()
        await r.text(first)
        await r.text(second)
        told = [end.request_id for place in r.cluster.places for end in place.ended]
        assert told == [first.request.request_id]
        await r.peers.drain(10.0)
        assert [end.request_id for end in r.cluster.ends] == [first.request.request_id, second.request.request_id]


async def test_ends_that_did_not_reach_the_router_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.ends, "FLUSH_S", 0.5)
    async with rig() as r:
        first = r.run()
        await r.text(first)
        place, calls = r.cluster.place, 0

        async def away_once(request: t.PlaceRequest) -> t.Placement:
            nonlocal calls
            calls += 1
            if calls == 1:
                assert request.ended
                raise WorkerLost("router is not reachable", worker_id="router")
            return await place(request)

        r.cluster.place = away_once  # type: ignore[method-assign]
        await r.text(r.run())
        assert first.request.request_id in {end.request_id for end in r.cluster.ends}


async def test_the_record_tells_of_every_attempt_and_how_it_ended() -> None:
    faults = {1: Fault(on_admit=LOST), 2: Fault(on_admit=OutOfBlocks("full")), 3: Fault(fail_at=4)}
    async with rig(Script(steps=STEPS, faults=faults, num_decodes=3)) as r:
        run = r.run()
        assert await r.text(run) == TEXT
        history = run.record().history
        assert [one.attempt for one in history] == [1, 2, 3, 4] and run.record().attempts == 4
        assert [one.outcome for one in history] == ["worker_lost", "out_of_blocks", "worker_lost", "ok"]
        assert [one.message for one in history][:2] == ["scripted", "full"]
        assert all(one.placement is not None and one.placement.decode.worker_id for one in history)
        assert [one.started_s for one in history] == sorted(one.started_s for one in history)
        assert sum(one.duration_s for one in history) <= run.record().duration_s


async def test_the_record_tells_of_a_placement_that_never_came() -> None:
    async with rig(Script(steps=STEPS, faults={1: Fault(on_place=NoWorker("no worker is left"))})) as r:
        run = r.run()
        with pytest.raises(NoWorker):
            await r.text(run)
        (one,) = run.record().history
        assert (one.outcome, one.message, one.placement) == ("no_worker", "no worker is left", None)


async def test_a_record_keeps_the_latest_of_many_attempts() -> None:
    faults = {n: Fault(on_admit=QueueFull("full" * 1000)) for n in range(1, 100)}
    async with rig(Script(steps=STEPS, faults=faults)) as r:
        run = r.run()
        run.history.extend([t.AttemptRecord(attempt=0, started_s=0, duration_s=0, num_choices=1, outcome="ok")] * 20)
        with pytest.raises(QueueFull):
            await r.text(run)
        history = run.record().history
        assert len(history) == MAX_HISTORY and history[-1].attempt == run.attempt
        assert len(history[-1].message) == MAX_MESSAGE
