"""When a worker may say that it is ready: after a canary hand-off with a live peer, where there is one."""

from __future__ import annotations

from core.ids import Incarnation, WorkerId
from core.types import WorkerAddress
from worker.proof import Proof


def peer(name: str, incarnation: int = 1) -> WorkerAddress:
    return WorkerAddress(worker_id=WorkerId(name), incarnation=Incarnation(incarnation), address=f"{name}:1")


def settled(proof: Proof) -> list[None]:
    calls: list[None] = []
    proof.on_settled = lambda: calls.append(None)
    return calls


def test_nothing_is_known_before_the_router_has_answered() -> None:
    proof = Proof()
    assert proof.why_not is not None and "router" in proof.why_not


def test_the_first_worker_of_a_cell_has_nobody_to_try() -> None:
    proof = Proof()
    calls = settled(proof)
    proof.meet(())
    assert proof.why_not is None and len(calls) == 1


def test_one_good_peer_is_enough_and_the_reason_names_those_that_are_not() -> None:
    proof = Proof()
    calls = settled(proof)
    proof.meet((peer("d0"), peer("d1")))
    proof.note(WorkerId("d0"), Incarnation(1), "the canary is not what it should be")
    assert proof.why_not is not None and "d0: the canary is not" in proof.why_not
    assert "d1: not tried yet" in proof.why_not
    proof.meet((peer("d0"), peer("d1"), peer("d2")))
    assert "d0: the canary is not" in (proof.why_not or "")
    proof.note(WorkerId("d1"), Incarnation(1), "")
    assert proof.why_not is None and len(calls) == 1


def test_what_an_old_start_of_a_peer_said_does_not_count() -> None:
    proof = Proof()
    proof.meet((peer("d0", 2),))
    proof.note(WorkerId("d0"), Incarnation(1), "broken")
    assert "not tried yet" in (proof.why_not or "")


def test_when_the_last_peer_dies_there_is_nobody_to_wait_for_and_it_stays_so() -> None:
    proof = Proof()
    calls = settled(proof)
    proof.meet((peer("d0"),))
    assert proof.why_not is not None
    proof.meet(())
    proof.meet((peer("d1"),))
    proof.note(WorkerId("d1"), Incarnation(1), "broken")
    assert proof.why_not is None and len(calls) == 1
