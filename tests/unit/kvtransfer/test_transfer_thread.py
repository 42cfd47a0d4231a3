import asyncio
import threading
from dataclasses import replace

import pytest

from core.errors import BackendFailed, ConfigError
from core.handoff import HandoffOutcome
from core.ids import new_incarnation
from kvtransfer.backends import create_backend
from kvtransfer.backends.inproc import Fabric, Fault
from kvtransfer.fetch import FetchRequest, FetchResult
from kvtransfer.transfer_thread import TransferThread
from tests.support.transfer_side import Side


class Running:
    """P and D on one fabric, with D's thread running."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.p = Side(self.fabric.backend(), "P")
        self.d = Side(self.fabric.backend(), "D")
        self.p.fill(1)
        _, self.grant = self.p.seal("h", [3, 4])
        self.died = threading.Event()
        self.thread: TransferThread = self.d.thread(on_death=self.died.set)
        self.thread.start()
        self.link = self.thread.connect(self.p.peer).result(5)

    def request(self, transfer_id: int, local: tuple[int, ...] = (0, 1)) -> FetchRequest:
        return FetchRequest(
            transfer_id=transfer_id,
            remote_blocks=self.grant.block_ids,
            local_blocks=local,
            lease=self.grant.lease,
            slot=self.grant.slot,
            deadline_s=30.0,
        )


async def test_a_fetch_is_awaited_from_an_event_loop() -> None:
    running = Running()
    transfer = running.thread.fetch(running.link, running.request(1))
    result: FetchResult = await asyncio.wait_for(asyncio.wrap_future(transfer.result), 5)
    await asyncio.wait_for(asyncio.wrap_future(transfer.quiet), 5)
    assert result.outcome is HandoffOutcome.OK
    assert result.times.total_s >= result.times.queue_s + result.times.wire_s
    assert await asyncio.to_thread(running.thread.stop, 1.0)
    assert not running.died.is_set()


async def test_a_cancelled_waiter_does_not_disturb_the_fetch() -> None:
    running = Running()
    hold = Fault(delay_polls=-1)
    running.fabric.on_post = lambda reader, peer, batch: hold
    transfer = running.thread.fetch(running.link, running.request(1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(transfer.result), 0.01)
    assert not transfer.result.cancelled()
    transfer.abandon()
    transfer.abandon()
    result = await asyncio.wait_for(asyncio.wrap_future(transfer.result), 5)
    assert result.outcome is HandoffOutcome.ABORTED
    assert running.d.pool.pinned == {0, 1}
    running.fabric.resume()
    await asyncio.wait_for(asyncio.wrap_future(transfer.quiet), 5)
    assert running.d.pool.pinned == set()
    assert await asyncio.to_thread(running.thread.stop, 1.0)


def test_many_threads_may_fetch_at_once() -> None:
    running = Running()
    outcomes: list[HandoffOutcome] = []

    def fetch(number: int) -> None:
        for step in range(10):
            local = (2 * number, 2 * number + 1)
            transfer = running.thread.fetch(running.link, running.request(100 * number + step, local))
            outcomes.append(transfer.result.result(5).outcome)
            transfer.quiet.result(5)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert outcomes == [HandoffOutcome.OK] * 40
    assert running.thread.stop(1.0)


def test_a_stop_that_drains_is_clean_and_everything_after_it_is_refused() -> None:
    running = Running()
    assert running.thread.stop(1.0) and running.thread.stop(1.0)
    assert not running.thread.is_alive
    with pytest.raises(BackendFailed, match="stopped"):
        running.thread.fetch(running.link, running.request(1))
    with pytest.raises(BackendFailed, match="stopped"):
        running.thread.connect(running.p.peer).result(0)
    assert running.d.pool.pinned == set()


def test_a_thread_that_was_never_started_is_stopped_too() -> None:
    side = Side(Fabric().backend(), "D")
    thread = side.thread()
    transfer = thread.connect(side.peer)
    assert thread.stop(1.0) and not thread.is_alive
    with pytest.raises(BackendFailed):
        transfer.result(0)


def test_a_stop_that_cannot_drain_ends_in_time_and_says_so() -> None:
    running = Running()
    posted = threading.Event()

    def hang(*_: object) -> Fault:
        posted.set()
        return Fault(delay_polls=-1)

    running.fabric.on_post = hang
    transfer = running.thread.fetch(running.link, running.request(1))
    assert posted.wait(5)
    assert running.thread.stop(0.05) is False
    assert transfer.result.result(0).outcome in (HandoffOutcome.ABORTED, HandoffOutcome.BACKEND_FAILED)
    transfer.quiet.result(0)
    assert running.d.pool.pinned == set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_a_bug_leaves_nobody_waiting() -> None:
    running = Running()

    def bug(*_: object) -> None:
        raise ZeroDivisionError

    running.fabric.on_post = bug
    transfer = running.thread.fetch(running.link, running.request(1))
    assert transfer.result.result(5).outcome is HandoffOutcome.BACKEND_FAILED
    transfer.quiet.result(5)
    assert running.died.wait(5), "its worker is told"
    assert running.thread.stop(1.0) is False and not running.thread.is_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connect_that_meets_a_bug_ends_too() -> None:
    running = Running()
    peer = replace(running.p.peer, incarnation=new_incarnation(), link=None)  # type: ignore[arg-type]
    with pytest.raises(BackendFailed):
        running.thread.connect(peer).result(5)
    assert running.thread.stop(1.0) and not running.thread.is_alive


def test_an_idle_thread_does_not_wake_up() -> None:
    running = Running()
    turns = 0
    real = running.thread._loop.turn

    def counting() -> bool:
        nonlocal turns
        turns += 1
        return real()

    running.thread._loop.turn = counting  # type: ignore[method-assign]
    for number in range(20):
        running.thread.fetch(running.link, running.request(number)).quiet.result(5)
    # At most: the command, the data, the slot, and one turn to notice that nothing is left.
    assert turns <= 20 * 6
    assert running.thread.stop(1.0)


def test_backends_are_known_by_name() -> None:
    assert create_backend("inproc", fabric=Fabric()).name == "inproc"
    with pytest.raises(ConfigError, match="inside one process"):
        create_backend("inproc")
    with pytest.raises(ConfigError, match="'carrier-pigeon' is unknown"):
        create_backend("carrier-pigeon")
