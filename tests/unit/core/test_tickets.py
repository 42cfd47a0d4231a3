"""Tickets: for whom, for what, until when; and what is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.clock import ManualClock
from core.errors import TicketRefused
from core.ids import HandoffId, Incarnation, RequestId, WorkerId
from core.tickets import INTRODUCTION_S, SLACK_S, Ticket, TicketDesk, TicketOffice, sign
from core.types import WorkerAddress


def worker(name: str, incarnation: int = 1) -> WorkerAddress:
    return WorkerAddress(worker_id=WorkerId(name), incarnation=Incarnation(incarnation), address="x:1")


P, D, OTHER = worker("p"), worker("d", 2), worker("e", 3)
CLAIM: dict[str, Any] = {"handoff_id": HandoffId("h"), "request_id": RequestId("r"), "attempt": 1}


class Cell:
    """A router and a holder, whose clocks began at different times."""

    def __init__(self) -> None:
        self.router_clock, self.clock = ManualClock(100.0), ManualClock(7.0)
        self.office = TicketOffice(self.router_clock)
        self.desk = TicketDesk(P.worker_id, P.incarnation, self.clock)
        self.pass_time(3)
        self.desk.learn(self.office.key_for(P.worker_id, P.incarnation))

    def pass_time(self, seconds: float) -> None:
        self.router_clock.advance(seconds)
        self.clock.advance(seconds)

    def ticket(self, *, reader: WorkerAddress = D, holder: WorkerAddress = P, **other: Any) -> bytes:
        claim = {**CLAIM, "tenant": "t", "deadline_s": 60.0, **other}
        return self.office.sign_claim(reader, holder, **claim)

    def check(self, ticket: bytes, *, reader: WorkerAddress = D, **other: Any) -> Ticket:
        return self.desk.check_claim(
            ticket, reader=reader.worker_id, incarnation=reader.incarnation, **{**CLAIM, **other}
        )


def test_a_claim_is_taken_from_whom_it_is_for_and_says_whose_it_is() -> None:
    cell = Cell()
    ticket = cell.check(cell.ticket(tenant="acme"))
    assert (ticket.tenant, ticket.reader, ticket.holder) == ("acme", "d", "p")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"reader": OTHER}, "another reader's"),
        ({"reader": replace(D, incarnation=Incarnation(9))}, "another reader's"),
        ({"handoff_id": HandoffId("other")}, "for another claim"),
        ({"request_id": RequestId("other")}, "for another claim"),
        ({"attempt": 2}, "for another claim"),
    ],
)
def test_it_opens_nothing_else(asked: dict[str, Any], told: str) -> None:
    cell = Cell()
    with pytest.raises(TicketRefused, match=told):
        cell.check(cell.ticket(), **asked)


def test_it_expires_by_the_routers_time_whatever_the_holders_clock_says() -> None:
    cell = Cell()
    ticket = cell.ticket(deadline_s=10)
    cell.pass_time(10 + SLACK_S - 0.1)
    cell.check(ticket)
    cell.pass_time(0.2)
    with pytest.raises(TicketRefused, match="expired 0 s ago"):
        cell.check(ticket)


def test_an_introduction_is_for_a_pair_and_claims_nothing() -> None:
    cell = Cell()
    introduction = cell.office.introduce(D, P)
    cell.desk.check_introduction(introduction, reader=D.worker_id, incarnation=D.incarnation)
    cell.desk.check_introduction(cell.ticket(), reader=D.worker_id, incarnation=D.incarnation)
    with pytest.raises(TicketRefused, match="another reader's"):
        cell.desk.check_introduction(introduction, reader=OTHER.worker_id, incarnation=OTHER.incarnation)
    with pytest.raises(TicketRefused, match="for another claim"):
        cell.check(introduction)
    cell.pass_time(INTRODUCTION_S)
    with pytest.raises(TicketRefused, match="expired"):
        cell.desk.check_introduction(introduction, reader=D.worker_id, incarnation=D.incarnation)


def test_every_changed_byte_is_noticed() -> None:
    cell = Cell()
    ticket = cell.ticket()
    for position in range(len(ticket)):
        spoilt = bytearray(ticket)
        spoilt[position] ^= 1
        with pytest.raises(TicketRefused):
            cell.check(bytes(spoilt))
    for what in (b"", b"x", ticket[:8], ticket[:40], ticket + b" ", bytes(5000)):
        with pytest.raises(TicketRefused):
            cell.check(what)


def test_the_key_of_one_holder_signs_nothing_for_another() -> None:
    """A worker that is taken over can forge tickets for itself only."""
    cell = Cell()
    for holder in (worker("q"), replace(P, incarnation=Incarnation(8))):
        with pytest.raises(TicketRefused, match="does not know"):
            cell.check(cell.ticket(holder=holder))
        stolen = cell.office.key_for(holder.worker_id, holder.incarnation).secret
        forged = Ticket(
            holder=P.worker_id,
            holder_incarnation=P.incarnation,
            reader=D.worker_id,
            reader_incarnation=D.incarnation,
            expires_at=1e9,
            **CLAIM,
        )
        with pytest.raises(TicketRefused, match="does not know"):
            cell.check(sign(stolen, forged))


def test_tickets_of_the_router_before_are_good_until_they_expire() -> None:
    cell = Cell()
    old = cell.ticket(deadline_s=60)
    cell.office = TicketOffice(cell.router_clock)
    with pytest.raises(TicketRefused, match="does not know"):
        cell.check(cell.ticket())
    cell.desk.learn(cell.office.key_for(P.worker_id, P.incarnation))
    cell.check(cell.ticket())
    cell.check(old)
    cell.pass_time(91)
    with pytest.raises(TicketRefused, match="expired"):
        cell.check(old)
    for _ in range(4):
        cell.desk.learn(TicketOffice(cell.router_clock).key_for(P.worker_id, P.incarnation))
    with pytest.raises(TicketRefused, match="does not know"):
        cell.check(cell.ticket())


def test_a_key_is_not_printed() -> None:
    key = Cell().office.key_for(P.worker_id, P.incarnation)
    assert key.secret.hex() not in repr(key) and repr(key.secret) not in repr(key)
