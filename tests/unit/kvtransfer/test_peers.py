from dataclasses import replace

import pytest

from core.errors import StaleIncarnation
from core.handoff import PeerInfo
from core.ids import Incarnation, WorkerId
from kvtransfer.backends.base import Link
from kvtransfer.backends.inproc import Fabric
from kvtransfer.peers import Peers
from tests.support.transfer_side import Side

PEER = Side(Fabric().backend(), "P", incarnation=Incarnation(1)).peer


def link(incarnation: int) -> Link:
    return Link(with_incarnation(incarnation))


def with_incarnation(incarnation: int) -> PeerInfo:
    return replace(PEER, incarnation=Incarnation(incarnation))


def test_a_new_incarnation_replaces_the_old_one_for_good() -> None:
    peers = Peers()
    old, new = link(1), link(2)
    assert peers.add(old) is None
    assert peers.find(old.peer) is old
    assert peers.add(new) is old
    assert peers.usable == (new,) and not peers.is_usable(old)
    with pytest.raises(StaleIncarnation, match="replaced"):
        peers.find(old.peer)


def test_a_retired_link_is_disconnected_once_nothing_is_pending_on_it() -> None:
    peers = Peers()
    old = link(1)
    peers.add(old)
    old.num_pending = 1
    peers.add(link(2))
    gone: list[Link] = []
    peers.sweep(gone.append)
    assert gone == [] and peers.num_retired == 1
    old.num_pending = 0
    peers.sweep(gone.append)
    peers.sweep(gone.append)
    assert gone == [old] and peers.num_retired == 0


def test_forgetting_an_incarnation_never_touches_another_one() -> None:
    peers = Peers()
    new = link(2)
    peers.add(new)
    assert peers.forget(WorkerId("P"), Incarnation(1)) is None
    assert peers.is_usable(new)
    with pytest.raises(StaleIncarnation):
        peers.find(with_incarnation(1))
    assert peers.forget(WorkerId("P"), Incarnation(2)) is new
    assert peers.usable == ()


def test_a_dead_link_is_not_found_and_can_be_taken_down_to_connect_again() -> None:
    peers = Peers()
    dead = link(1)
    peers.add(dead)
    dead.is_dead = True
    assert peers.find(dead.peer) is None and peers.usable == ()
    assert peers.drop_dead(dead.peer) is dead
    assert peers.drop_dead(dead.peer) is None
    again = link(1)
    peers.add(again)
    assert peers.find(again.peer) is again


def test_a_discarded_link_that_proves_itself_after_all_is_not_swept_away() -> None:
    peers = Peers()
    slow = link(1)
    slow.num_pending = 1
    peers.discard(slow)
    peers.add(slow)
    slow.num_pending = 0
    gone: list[Link] = []
    peers.sweep(gone.append)
    assert gone == [] and peers.is_usable(slow)
