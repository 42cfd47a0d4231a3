"""Waiting for a worker, with time under control."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.clock import ManualClock
from core.errors import ContextTooLong, ModelNotFound, NoWorker, Overloaded, QueueFull, ServingError, TooManyWaiting
from core.ids import HandoffId, Incarnation, PlacementId, WorkerId
from core.priority import PriorityClass
from core.types import Mode, Placement, PlaceRequest, WorkerAddress
from router.policy import Lack, Shortfall
from router.waiting import MAX_OVERTAKEN, MAX_TRIES, Refusal, WaitingRoom
from tests.unit.router.builders import make_request


class Fleet:
    """Stands for the placer: has a path, or lacks something; notes what it placed and got back."""

    def __init__(self) -> None:
        self.lack: Shortfall | None = Shortfall(lack=Lack.NO_DECODE, message="no decode worker")
        self.error: ServingError | None = None
        self.placed: list[PlaceRequest] = []
        self.released: list[Placement] = []
        self.num_paths: int | None = None
        self.most_tokens: int | None = None
        self.lack_after = Lack.NO_DECODE

    def place_now(self, request: PlaceRequest) -> Placement | Shortfall:
        if self.error is not None:
            raise self.error
        if self.lack is not None:
            return self.lack
        if (WorkerId("d0"), Incarnation(1)) in request.excluded_workers:
            return Shortfall(lack=Lack.NO_DECODE, message="no ready decode worker (1 failed this request)")
        if self.most_tokens is not None and request.num_prompt_tokens > self.most_tokens:
            return Shortfall(lack=Lack.NO_ROOM, message="no room for so many tokens")
        if self.num_paths is not None:
            if self.num_paths == 0:
                return Shortfall(lack=self.lack_after, message="no decode worker")
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
        self.refusals: list[Refusal] = []
        self.room = self.make_room()
        self.tasks: list[asyncio.Task[Placement]] = []

    def make_room(self, *, max_waiting: int = 3, max_wait_s: float = 20.0) -> WaitingRoom:
        return WaitingRoom(
            self.clock,
            place_now=self.fleet.place_now,
            release=self.fleet.released.append,
            placement_wait_s=20.0,
            forgive_s=3.0,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            on_refusal=lambda request, refusal: self.refusals.append(refusal),
        )

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


def lacks_room(scene: Scene, *, ttft_s: float = 0.0) -> None:
    scene.fleet.lack = Shortfall(lack=Lack.NO_ROOM, message="d0 has 8 requests", ttft_s=ttft_s)


async def serve(scene: Scene, num_paths: int) -> None:
    """So many find room now."""
    scene.fleet.lack, scene.fleet.num_paths, scene.fleet.lack_after = None, num_paths, Lack.NO_ROOM
    scene.room.wake_for_room()
    lacks_room(scene)
    await settle()


async def test_room_goes_to_the_tenant_that_has_had_least(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=100)
    lacks_room(scene)
    for number in range(6):
        await scene.enter(make_request(f"flood{number}", tenant="flood"))
    for number in range(2):
        await scene.enter(make_request(f"quiet{number}", tenant="quiet"))
    for _ in range(4):
        await serve(scene, 1)
    assert [r.request_id for r in scene.fleet.placed] == ["flood0", "quiet0", "flood1", "quiet1"]


async def test_nobody_overtakes_for_room_at_arrival(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=100)
    lacks_room(scene)
    first = [await scene.enter(make_request(f"r{number}")) for number in range(4)]
    scene.fleet.lack = None  # there is room now, and nobody has said so yet
    late = await scene.enter(make_request("late"))
    assert not late.done() and not any(each.done() for each in first)
    scene.room.wake_for_room()
    await settle()
    assert [r.request_id for r in scene.fleet.placed] == ["r0", "r1", "r2", "r3", "late"]


async def test_a_large_one_is_overtaken_a_few_times_and_no_more(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=100)
    lacks_room(scene)
    large = await scene.enter(make_request("large", num_prompt_tokens=1000, age_s=1.0))
    small = [await scene.enter(make_request(f"small{number}")) for number in range(2 * MAX_OVERTAKEN)]
    scene.fleet.lack, scene.fleet.most_tokens = None, 500
    for _ in range(2 * MAX_OVERTAKEN):
        scene.room.wake_for_room()
    await settle()
    assert sum(each.done() for each in small) == MAX_OVERTAKEN and not large.done()
    scene.fleet.most_tokens = 10_000
    scene.room.wake_for_room()
    await settle()
    assert large.done() and all(each.done() for each in small)


async def test_who_lacks_a_worker_holds_up_nobody(scene: Scene) -> None:
    scene.fleet.lack = None
    picky = await scene.enter(make_request("picky", excluded_workers=(("d0", 1),), age_s=9.0))
    assert (await scene.enter(make_request("other"))).done() and not picky.done()


async def test_who_waited_for_a_worker_that_came_while_others_took_its_room_is_served_when_there_is_some(
    scene: Scene,
) -> None:
    """The worker's coming is told once; whose turn did not come then must be tried later all the same."""
    scene.room = scene.make_room(max_waiting=100)
    num = 2 * MAX_TRIES + 2
    tasks = [await scene.enter(make_request(f"r{i}")) for i in range(num)]
    scene.fleet.lack, scene.fleet.num_paths, scene.fleet.lack_after = None, 1, Lack.NO_ROOM
    scene.room.wake()
    await settle()
    assert sum(task.done() for task in tasks) == 1
    scene.fleet.num_paths = num
    scene.room.wake_for_room()
    await settle()
    assert all(task.done() for task in tasks)


async def test_who_is_refused_late_is_told_what_is_lacking_now(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=100)
    tasks = [await scene.enter(make_request(f"r{i}")) for i in range(2 * MAX_TRIES)]
    scene.fleet.lack, scene.fleet.num_paths, scene.fleet.lack_after = None, 0, Lack.NO_ROOM
    scene.room.wake()
    scene.clock.advance(25.0)
    scene.room.tick()
    await settle()
    assert {type(task.exception()) for task in tasks} == {Overloaded}


async def test_a_wait_that_would_be_too_long_is_refused_at_once_with_numbers(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=1000, max_wait_s=4.0)
    lacks_room(scene)
    for number in range(12):
        await scene.enter(make_request(f"r{number}"))
    for _ in range(8):  # one in half a second
        scene.clock.advance(0.25)
        scene.clock.advance(0.25)
        await serve(scene, 1)
        await scene.enter(make_request(f"more{scene.clock.now()}"))
    with pytest.raises(
        Overloaded, match=r"it would wait \d\.\d s \(\d+ tokens are ahead, \d+ a second .*, and it may wait 4\.0 s"
    ) as refusal:
        await scene.room.place(make_request())
    assert refusal.value.retry_after_s is not None and 1.0 <= refusal.value.retry_after_s < 3.0
    assert scene.refusals[-1] is Refusal.TOO_LATE
    again = await scene.enter(make_request("again", attempt=2))
    assert not again.done(), "an answer that has begun is not cut off for that"


async def test_a_deadline_that_the_first_token_would_miss_is_told_at_once(scene: Scene) -> None:
    scene.room = scene.make_room(max_waiting=1000)
    lacks_room(scene)
    for number in range(12):
        await scene.enter(make_request(f"r{number}"))
    for _ in range(6):
        scene.clock.advance(0.5)
        await serve(scene, 1)
    lacks_room(scene, ttft_s=3.0)
    scene.room.wake_for_room()
    with pytest.raises(Overloaded, match=r"with 3\.0 s to its first token it would miss its deadline"):
        await scene.room.place(make_request(deadline_s=5.0))
    assert not (await scene.enter(make_request(deadline_s=30.0))).done()


async def test_waiting_for_room_ends_in_time_with_the_reason(scene: Scene) -> None:
    scene.room = scene.make_room(max_wait_s=4.0)
    lacks_room(scene)
    task = await scene.enter(make_request())
    scene.clock.advance(4.0)
    scene.room.tick()
    with pytest.raises(Overloaded, match=r"d0 has 8 requests; it has waited 4.0 s"):
        await task
    assert scene.refusals == [Refusal.WAITED_OUT]


async def test_a_full_queue_refuses_with_429_and_a_higher_class_takes_a_place_once(scene: Scene) -> None:
    lacks_room(scene)
    waiting = [await scene.enter(make_request(f"r{number}", age_s=9.0 - number)) for number in range(3)]
    with pytest.raises(TooManyWaiting, match="d0 has 8 requests, and 3 requests wait already") as refusal:
        await scene.room.place(make_request())
    assert refusal.value.http_status == 429
    high = await scene.enter(make_request("high", priority=PriorityClass.HIGH.rank(0)))
    with pytest.raises(TooManyWaiting, match="one of a higher priority class has taken the place"):
        await waiting[2]
    assert not high.done() and len(scene.room) == 3
    await serve(scene, 1)
    assert high.done() and [r.request_id for r in scene.fleet.placed] == ["high"]
    assert scene.refusals == [Refusal.QUEUE_FULL, Refusal.DISPLACED]


async def test_each_model_has_its_own_queue(scene: Scene) -> None:
    lacks_room(scene)
    for number in range(3):
        await scene.enter(make_request(f"r{number}"))
    assert not (await scene.enter(make_request("other", model="other"))).done()
    lengths = {(model, priority): length for model, priority, length in scene.room.lengths() if length}
    assert lengths == {("tiny", PriorityClass.NORMAL): 3, ("other", PriorityClass.NORMAL): 1}
