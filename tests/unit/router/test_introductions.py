"""Of whom a worker is told: live workers of the other role of the same model and KV format, when they change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from core.clock import ManualClock
from core.ids import Incarnation, WorkerId
from core.tickets import INTRODUCTION_S, TicketDesk, TicketOffice
from core.types import CommandKind, Role, WorkerCommand, WorkerState
from router.introductions import Introductions
from router.registry import Commands, LivenessTimes, Membership, Registry
from tests.unit.router.builders import make_load, make_registration


class Cell:
    def __init__(self, *, is_local: bool = False, has_tickets: bool = False) -> None:
        self.clock = ManualClock(10.0)
        self.registry = Registry(self.clock, LivenessTimes(suspect_after_s=1.0, lost_after_s=3.0))
        office = TicketOffice(self.clock) if has_tickets else None
        self.introductions = Introductions(self.registry, is_local=is_local, clock=self.clock, office=office)
        self._unread: dict[str, list[WorkerCommand]] = {}
        self.joined: dict[str, list[str]] = {}
        self.members: dict[str, Membership] = {}

    def join(self, name: str, role: Role, *, format_hash: str = "f0", incarnation: int = 1, revision: str = "") -> None:
        commands: Commands = asyncio.Queue()
        registration = make_registration(name, incarnation, role, format_hash=format_hash)
        member = self.registry.join(replace(registration, revision=revision), commands)
        self.members[name] = member
        welcome = self.introductions.begin(member)
        self._unread[name] = [welcome]
        self.joined[name] = [peer.worker_id for peer in welcome.peers]
        self.introductions.tell()

    def say(self, name: str, state: WorkerState) -> None:
        self.registry.heartbeat(self.members[name], make_load(state))
        self.introductions.tell()

    def commands(self, name: str) -> list[WorkerCommand]:
        """The welcome, and what came since; each once."""
        found = self._unread.pop(name, [])
        while not self.members[name].commands.empty():
            command = self.members[name].commands.get_nowait()
            assert isinstance(command, WorkerCommand)
            found.append(command)
        return found

    def told(self, name: str) -> list[list[str]]:
        """Since it was asked last."""
        lists: list[list[str]] = []
        while not self.members[name].commands.empty():
            command = self.members[name].commands.get_nowait()
            assert isinstance(command, WorkerCommand) and command.kind is CommandKind.PEERS
            lists.append([peer.worker_id for peer in command.peers])
        return lists


def test_both_sides_hear_of_each_other_while_both_are_starting() -> None:
    cell = Cell()
    cell.join("p0", Role.PREFILL)
    cell.join("d0", Role.DECODE)
    assert cell.joined == {"p0": [], "d0": ["p0"]}
    assert cell.told("p0") == [["d0"]] and cell.told("d0") == []


def test_only_workers_that_can_hand_off_with_each_other_meet() -> None:
    cell = Cell()
    cell.join("p0", Role.PREFILL)
    cell.join("p1", Role.PREFILL)
    cell.join("d0", Role.DECODE, format_hash="another")
    cell.join("u0", Role.UNIFIED)
    assert cell.told("p0") == cell.told("p1") == [] and cell.joined["d0"] == cell.joined["u0"] == []


def test_news_is_told_once_and_a_new_start_is_news() -> None:
    cell = Cell()
    cell.join("p0", Role.PREFILL)
    cell.join("d0", Role.DECODE)
    cell.say("p0", WorkerState.READY)
    cell.say("d0", WorkerState.READY)
    assert cell.told("d0") == []
    cell.join("p0", Role.PREFILL, incarnation=2)
    assert cell.told("d0") == [["p0"]]


def test_whoever_drains_or_is_silent_is_no_peer() -> None:
    cell = Cell()
    cell.join("p0", Role.PREFILL)
    cell.join("d0", Role.DECODE)
    cell.say("p0", WorkerState.DRAINING)
    assert cell.told("d0") == [[]]
    cell.say("p0", WorkerState.READY)
    assert cell.told("d0") == [["p0"]]
    cell.clock.advance(2.0)
    cell.say("d0", WorkerState.READY)
    assert cell.told("d0") == [[]]


def test_where_nothing_is_handed_off_nobody_meets() -> None:
    cell = Cell(is_local=True)
    cell.join("p0", Role.PREFILL)
    cell.join("d0", Role.DECODE)
    assert cell.joined["d0"] == [] and cell.told("p0") == []


def test_another_revision_is_another_model_to_hand_off_with() -> None:
    cell = Cell()
    cell.join("p0", Role.PREFILL)
    cell.join("d0", Role.DECODE)
    cell.join("d1", Role.DECODE, revision="two")
    assert cell.joined["d1"] == [] and cell.told("p0") == [["d0"]]


def test_readers_are_introduced_to_holders_by_tickets_that_are_renewed_before_they_expire() -> None:
    cell = Cell(has_tickets=True)
    cell.join("p0", Role.PREFILL)
    desk = TicketDesk(WorkerId("p0"), Incarnation(1), cell.clock)
    for command in cell.commands("p0"):
        assert command.ticket_key is not None and command.tickets == ()
        desk.learn(command.ticket_key)
    cell.join("d0", Role.DECODE)
    shown = [command.tickets for command in cell.commands("d0")]
    assert len(shown) == 1 and all(command.ticket_key is None for command in cell.commands("d0"))
    for _ in range(16):
        cell.clock.advance(INTRODUCTION_S / 4)
        for name in cell.members:
            cell.say(name, WorkerState.READY)
        cell.introductions.keep_fresh()
        for command in cell.commands("p0"):
            assert command.ticket_key is not None
            desk.learn(command.ticket_key)
        shown += [command.tickets for command in cell.commands("d0")]
        desk.check_introduction(shown[-1][0], reader=WorkerId("d0"), incarnation=Incarnation(1))
    assert len(shown) > 4
