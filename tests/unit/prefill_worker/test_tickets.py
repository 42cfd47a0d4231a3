"""A prefill worker that asks for tickets: without the right one it tells nothing of its memory and gives no block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import Cancelled, TicketRefused
from core.handoff import Claim, Ended, HandoffOutcome, Hello, Open, Ready, Refused, Release, Sealed, ToHolder
from core.ids import HandoffId, Incarnation, RequestId, WorkerId
from core.tickets import TicketDesk, TicketOffice
from core.types import CommandKind, TicketKey, WorkerAddress, WorkerCommand
from tests.unit.prefill_worker.conftest import INCARNATION, H, Rig
from worker.tickets import Tickets

HOLDER = WorkerAddress(worker_id=WorkerId("prefill-0"), incarnation=INCARNATION, address="x:1")
READER = WorkerAddress(worker_id=WorkerId("decode-0"), incarnation=Incarnation(9), address="x:2")
OTHER = WorkerAddress(worker_id=WorkerId("decode-1"), incarnation=Incarnation(8), address="x:3")


class Gate:
    """A rig whose worker asks for tickets, and the router that writes them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.office = TicketOffice(rig.clock)
        rig.context.tickets = Tickets(TicketDesk(HOLDER.worker_id, INCARNATION, rig.clock))
        rig.context.tickets.learn(self.command(self.office.key_for(HOLDER.worker_id, INCARNATION)))

    @staticmethod
    def command(key: TicketKey) -> WorkerCommand:
        return WorkerCommand(kind=CommandKind.JOINED, ticket_key=key)

    def ticket(self, *, reader: WorkerAddress = READER, **other: Any) -> bytes:
        claim = {"handoff_id": H, "request_id": RequestId("r"), "attempt": 1, "tenant": "", "deadline_s": 60.0}
        return self.office.sign_claim(reader, HOLDER, **{**claim, **other})

    def ask(self, ticket: bytes, *, attempt: int = 1, kind: type[Open] | type[Claim] = Open) -> None:
        self.rig.to_holder.put_nowait(
            kind(handoff_id=H, request_id=RequestId("r"), attempt=attempt, ticket=ticket)  # type: ignore[arg-type]
        )

    async def answer(self) -> Ready | Sealed | Refused:
        reply = await self.rig.next_reply()
        assert isinstance(reply, Ready | Sealed | Refused)
        return reply


@pytest.fixture
def gate(rig: Rig) -> Gate:
    return Gate(rig)


async def test_the_right_ticket_opens_the_hand_off_and_comes_again_as_often_as_it_must(gate: Gate) -> None:
    gate.ask(gate.ticket())
    await gate.rig.prefill()
    assert isinstance(await gate.answer(), Sealed)
    gate.rig.clock.advance(1)
    gate.ask(b"")  # a claim that is made already: its answer was lost
    assert isinstance(await gate.answer(), Sealed)
    gate.rig.role.exports.end(H, Cancelled("the test is over"))


def wrong(gate: Gate) -> dict[str, bytes]:
    """By what is wrong with it."""
    expired = gate.ticket(deadline_s=0.0)
    good = gate.ticket()
    return {
        "no ticket": b"",
        "not as the router wrote it": good[:-3] + b"x" + good[-2:],
        "a router that this worker does not know": TicketOffice(ManualClock()).sign_claim(
            READER, HOLDER, handoff_id=H, request_id=RequestId("r"), attempt=1, tenant="", deadline_s=60
        ),
        "another reader's": gate.ticket(reader=OTHER),
        "for another claim": gate.ticket(handoff_id=HandoffId("other")),
        "another tenant's": gate.ticket(tenant="somebody else"),
        "expired": expired,
    }


WRONG = (
    "no ticket",
    "not as the router wrote it",
    "a router that this worker does not know",
    "another reader's",
    "for another claim",
    "another tenant's",
    "expired",
)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("is_early", [True, False])
async def test_a_wrong_ticket_gets_no_block_and_leaves_the_hand_off_to_the_right_one(
    gate: Gate, what: str, is_early: bool
) -> None:
    ticket = wrong(gate)[what]
    gate.rig.clock.advance(31)
    if is_early:
        gate.ask(ticket)
        await gate.rig.settle()
        await gate.rig.prefill()
    else:
        await gate.rig.prefill()
        gate.ask(ticket)
    refused = await gate.answer()
    assert isinstance(refused, Refused) and refused.slug == TicketRefused.slug and what in refused.message
    gate.ask(gate.ticket())
    assert isinstance(await gate.answer(), Sealed)
    gate.rig.role.exports.end(H, Cancelled("the test is over"))


async def test_a_wrong_claim_takes_nothing_from_the_one_that_holds(gate: Gate) -> None:
    gate.ask(gate.ticket())
    await gate.rig.prefill()
    sealed = await gate.answer()
    gate.ask(gate.ticket(), attempt=2, kind=Claim)  # the first ticket for a later claim
    refused = await gate.answer()
    assert isinstance(refused, Refused) and refused.attempt == 2
    view = gate.rig.role.exports._leases.find(H)
    assert isinstance(sealed, Sealed) and view is not None and view.reader is not None and view.reader.attempt == 1
    gate.ask(gate.ticket(attempt=2), attempt=2, kind=Claim)
    assert isinstance(await gate.rig.next_reply(), Ended)
    assert isinstance(await gate.answer(), Sealed)
    gate.rig.role.exports.end(H, Cancelled("the test is over"))


async def test_a_ticket_that_was_used_opens_nothing_again(gate: Gate) -> None:
    ticket = gate.ticket()
    gate.ask(ticket)
    await gate.rig.prefill()
    sealed = await gate.answer()
    assert isinstance(sealed, Sealed)
    gate.rig.to_holder.put_nowait(Release(handoff_id=H, lease=sealed.grant.lease, attempt=1, outcome=HandoffOutcome.OK))
    await gate.rig.settle()
    gate.ask(ticket)
    assert isinstance(await gate.answer(), Refused)
    assert gate.rig.role.is_idle()


@pytest.mark.parametrize("whose", ["nobody's", "another's", "good"])
async def test_nothing_is_told_of_the_memory_without_an_introduction(gate: Gate, whose: str) -> None:
    peer = next(iter(gate.rig.role.exports._connections.values())).peer
    ticket = {"nobody's": b"", "another's": gate.office.introduce(OTHER, HOLDER)}.get(
        whose, gate.office.introduce(READER, HOLDER)
    )

    async def messages() -> AsyncIterator[ToHolder]:
        yield Hello(peer=peer, ticket=ticket)
        await asyncio.Event().wait()

    replies = gate.rig.role.connect(messages())
    if whose == "good":
        await anext(replies)
    else:
        with pytest.raises(TicketRefused):
            await anext(replies)
    await replies.aclose()
