"""Waiting for a worker, with time under control."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.clock import ManualClock
from core.errors import ContextTooLong, ModelNotFound, NoWorker, QueueFull, ServingError
from core.ids import HandoffId, Incarnation, PlacementId, WorkerId
from core.types import Mode, Placement, PlaceRequest, WorkerAddress
from router.policy import Lack, Shortfall
from router.waiting import WaitingRoom
from tests.unit.router.builders import make_request


class Fleet:
    """Stands for the placer: has a path, or lacks something; notes what it placed and got back."""

    def __init__(self) -> None:
        self.lack: Shortfall | None = Shortfall(lack=Lack.NO_DECODE, message="no decode worker")
        self.error: ServingError | None = None
        self.placed: list[PlaceRequest] = []
        self.released: list[Placement] = []
        self.num_paths: int | None = None

    def place_now(self, request: PlaceRequest) -> Placement | Shortfall:
        if self.error is not None:
            raise self.error
        if self.lack is not None:
            return self.lack
        if (WorkerId("d0"), Incarnation(1)) in request.excluded_workers:
            return Shortfall(lack=Lack.NO_DECODE, message="no ready decode worker (1 failed this request)")
        if self.num_paths is not None:
            if self.num_paths == 0:
                return Shortfall(lack=Lack.NO_DECODE, message="no decode worker")
            self.num_paths -= 1
        self.placed.append(request)
        worker = WorkerAddress(worker_id=WorkerId("d0"), incarnation=Incarnation(1), address="d0:1")
        return Placement(
            placement_id=PlacementId(request.request_id), handoff_id=HandoffId("h"), mode=Mode.LOCAL, decode=worker
        )


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet()
        self.room = WaitingRoom(
            self.clock,
            place_now=self.fleet.place_now,
            release=self.fleet.released.append,
            placement_wait_s=20.0,
            forgive_s=3.0,
            max_waiting=3,
        )
        self.tasks: list[asyncio.Task[Placement]] = []

    async def enter(self, request: PlaceRequest) -> asyncio.Task[Placement]:
        """The request waits in a task of its own; on return it is in the room or has its answer."""
        task = asyncio.create_task(self.room.place(request))
        self.tasks.append(task)
        await settle()
        return task


async def settle() -> None:
    """Let every task run until it waits for something of ours."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    for task in scene.tasks:
        task.cancel()
    await asyncio.gather(*scene.tasks, return_exceptions=True)
    assert len(scene.room) == 0


async def test_nobody_waits_when_there_is_a_path(scene: Scene) -> None:
    scene.fleet.lack = None
    placement = await scene.room.place(make_request())
    assert placement.queue_s == 0.0


async def test_a_waiter_is_placed_when_a_worker_joins(scene: Scene) -> None:
    task = await scene.enter(make_request(deadline_s=60.0, age_s=1.0))
    scene.clock.advance(4.0)
    scene.fleet.lack = None
    scene.room.wake()
    assert (await task).queue_s == 4.0
    assert (scene.fleet.placed[0].deadline_s, scene.fleet.placed[0].age_s) == (56.0, 5.0)


async def test_the_wait_ends_with_what_is_missing_as_last_known(scene: Scene) -> None:
    task = await scene.enter(make_request())
    scene.fleet.lack = Shortfall(lack=Lack.NO_DECODE, message="no ready decode worker (1 starting)")
    scene.room.wake()
    scene.clock.advance(19.9)
    scene.room.tick()
    await settle()
    assert not task.done()
    scene.clock.advance(0.1)
    scene.room.tick()
    with pytest.raises(NoWorker, match=r"no ready decode worker \(1 starting\); none came within 20.0 s"):
        await task


async def test_the_refusal_comes_before_the_requests_own_deadline(scene: Scene) -> None:
    task = await scene.enter(make_request(deadline_s=2.0))
    scene.clock.advance(1.75)
    scene.room.tick()
    with pytest.raises(NoWorker):
        await task


async def test_a_model_that_nobody_knows_any_more_ends_the_wait_and_nothing_else(scene: Scene) -> None:
    tasks = [await scene.enter(make_request(name)) for name in ("r1", "r2")]
    scene.fleet.error = ModelNotFound("its last worker has gone")
    scene.room.wake()
    for task in tasks:
        with pytest.raises(ModelNotFound):
            await task


async def test_the_room_is_bounded(scene: Scene) -> None:
    for number in range(3):
        await scene.enter(make_request(f"r{number}"))
    with pytest.raises(QueueFull, match="no decode worker, and 3 requests wait already"):
        await scene.room.place(make_request("one too many"))


async def test_a_request_that_can_never_fit_does_not_wait(scene: Scene) -> None:
    scene.fleet.lack = Shortfall(lack=Lack.TOO_LONG, message="too long")
    with pytest.raises(ContextTooLong):
        await scene.room.place(make_request())


async def test_priority_then_age_decide_who_is_served_first(scene: Scene) -> None:
    await scene.enter(make_request("young"))
    await scene.enter(make_request("old", age_s=9.0))
    await scene.enter(make_request("urgent", priority=-1))
    scene.fleet.lack, scene.fleet.num_paths = None, 2
    scene.room.wake()
    assert [r.request_id for r in scene.fleet.placed] == ["urgent", "old"]
    assert len(scene.room) == 1


async def test_a_caller_who_leaves_is_forgotten(scene: Scene) -> None:
    task = await scene.enter(make_request())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    scene.fleet.lack = None
    scene.room.wake()
    assert scene.fleet.placed == [] and len(scene.room) == 0


async def test_a_placement_made_in_the_moment_the_caller_leaves_is_given_back(scene: Scene) -> None:
    task = await scene.enter(make_request("r1"))
    scene.fleet.lack = None
    scene.room.wake()  # placed, but the caller's coroutine has not run yet
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert [p.placement_id for p in scene.fleet.released] == ["r1"]


async def test_a_caller_who_left_before_the_wake_is_not_placed(scene: Scene) -> None:
    task = await scene.enter(make_request("r1"))
    task.cancel()  # delivered at the next turn of the loop
    scene.fleet.lack = None
    scene.room.wake()
    await asyncio.gather(task, return_exceptions=True)
    assert scene.fleet.placed == [] or [p.placement_id for p in scene.fleet.released] == ["r1"]


async def test_when_nothing_else_comes_a_blamed_worker_gets_another_try(scene: Scene) -> None:
    scene.fleet.lack = None
    task = await scene.enter(make_request(excluded_workers=(("d0", 1),)))
    scene.clock.advance(2.9)
    scene.room.tick()
    scene.room.wake()
    assert not task.done()
    scene.clock.advance(0.1)
    scene.room.tick()
    assert (await task).reason == "forgiven"


async def test_a_forgiven_worker_may_come_back_later(scene: Scene) -> None:
    task = await scene.enter(make_request(excluded_workers=(("d0", 1),)))
    scene.clock.advance(8.0)
    scene.room.tick()
    await settle()
    assert not task.done()
    scene.fleet.lack = None
    scene.room.wake()
    assert (await task).reason == "forgiven"
