"""What has ended is told to the router, whatever becomes of the call that tells it."""

import asyncio
from collections.abc import Coroutine
from typing import cast

import pytest

from core import types as t
from core.errors import DeadlineExceeded, InternalError, ServingError, WorkerLost
from core.ids import GatewayId, Incarnation, PlacementId, RequestId
from gateway import ends as ends_module
from gateway.ends import Ends
from gateway.legs import Peers
from gateway.ports import RouterPort


class Router:
    def __init__(self, *failures: ServingError) -> None:
        self.failures = list(failures)
        self.told: list[str] = []
        self.gate: asyncio.Event | None = None
        self.is_asked = asyncio.Event()

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        self.is_asked.set()
        assert self.gate is not None
        await self.gate.wait()
        raise AssertionError("nobody waits any more")

    async def end_placement(self, end: t.PlacementEnd) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.told.append(end.placement_id)


class Spawner:
    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]


def end(name: str) -> t.PlacementEnd:
    return t.PlacementEnd(placement_id=PlacementId(name), request_id=RequestId("r"), attempt=1, outcome="ok")


def question() -> t.PlaceRequest:
    return t.PlaceRequest(
        request_id=RequestId("r"),
        model="m",
        attempt=1,
        num_prompt_tokens=1,
        max_new_tokens=1,
        gateway_id=GatewayId("g"),
        gateway_incarnation=Incarnation(1),
        deadline_s=9.0,
    )


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(ends_module, "RETRY_S", 0.0)


@pytest.mark.parametrize("failure", [WorkerLost("away"), DeadlineExceeded("late")], ids=str)
async def test_a_router_that_is_away_is_told_when_it_is_back(failure: ServingError) -> None:
    router, spawner = Router(failure, failure, failure), Spawner()
    ends = Ends(cast(RouterPort, router), cast(Peers, spawner))
    for name in ("a", "b"):
        ends.add(end(name))
    await asyncio.wait_for(asyncio.gather(*spawner.tasks), 5)
    assert router.told == ["a", "b"]


async def test_an_end_that_the_router_refuses_holds_up_no_other() -> None:
    router, spawner = Router(InternalError("x")), Spawner()
    ends = Ends(cast(RouterPort, router), cast(Peers, spawner))
    for name in ("a", "b"):
        ends.add(end(name))
    await asyncio.wait_for(asyncio.gather(*spawner.tasks), 5)
    assert router.told == ["b"]


async def test_a_caller_who_leaves_while_it_asks_takes_no_end_with_him() -> None:
    router, spawner = Router(), Spawner()
    router.gate = asyncio.Event()
    ends = Ends(cast(RouterPort, router), cast(Peers, spawner))
    ends.add(end("a"))
    asking = asyncio.ensure_future(ends.told_with(question()))
    await router.is_asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*spawner.tasks), 5)
    assert router.told == ["a", ""], "the last one: whatever was placed meanwhile is over"
