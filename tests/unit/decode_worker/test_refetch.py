"""KV that is held for a decode worker that fails is fetched by another one: the prompt is computed once. Every
interleaving of design.md 4, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import pytest

from bench.virtual.loop import VirtualLoop
from bench.virtual.network import Pipe
from core import types as t
from core.errors import BackendFailed, InternalError, QueueFull, ServingError
from core.handoff import Claim, Ended
from kvtransfer.backends.inproc import Fault
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import answer_to
from tests.support.virtual.worker import VirtualWorker

PROMPT = tuple(range(3, 43))
"""Three steps of P."""
HANGS_S = 4.0
POINTS = (
    "prefill.computing",
    "prefill.announced",
    "prefill.digested",
    "prefill.seal",
    "prefill.sealed",
    "decode.opened",
    "decode.ready",
    "decode.digested",
    "decode.granted",
    "decode.fetched",
)
Strike = Callable[["Cell", VirtualWorker], None]


class Cell(Hooks):
    """One P, two D and a request. When ``point`` is first reached, ``strike`` hits the D that the request is placed
    on."""

    def __init__(self, point: str, strike: Strike) -> None:
        self.point, self.strike = point, strike
        self.context = copy_context()
        self.messages: list[Any] = []
        self.hit: VirtualWorker | None = None
        self.on_post: Callable[..., Fault | None] = lambda reader, peer, batch: None  # type: ignore[method-assign]

    def start(self, num_decodes: int = 2) -> None:
        self.cluster = VirtualCluster(config=make_config(), hooks=self, seed=0)
        self.prefill = self.cluster.start("prefill-0", num_blocks=24)
        for number in range(num_decodes):
            self.cluster.start(f"decode-{number}", num_blocks=24)
        self.asked = self.cluster.ask(PROMPT, max_tokens=4)

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        self.messages.append(message)
        return [(message, 0.0)]

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        placement = self.asked.run.last_placement
        if name == self.point and placement is not None:
            self.point = ""
            self.hit = next(each for each in self.cluster.workers if each.address == placement.decode)
            self.strike(self, self.hit)
            await asyncio.sleep(0.01)

    def outside(self, act: Callable[[], object]) -> None:
        """Not as one of the processes."""
        self.cluster.loop.call_later(0.0, act, context=self.context.copy())

    async def answered(self, within_s: float = 10.0) -> None:
        assert await self.cluster.until(lambda: self.asked.is_over, within_s)
        assert self.asked.error is None and self.asked.tokens == answer_to(PROMPT, 4)

    @property
    def num_refetched(self) -> int:
        return int(self.prefill.role.exports.refetched_tokens)

    async def end_idle(self, within_s: float = 1.0) -> None:
        """Laws 1 and 2; well before any lease time could have cleaned up, if not said otherwise."""
        alive = self.cluster.alive
        assert await self.cluster.until(lambda: all(worker.is_idle() for worker in alive), within_s)
        await self.cluster.close()


def dies(cell: Cell, worker: VirtualWorker) -> None:
    cell.outside(lambda: cell.cluster.kill(worker))


def hangs(cell: Cell, worker: VirtualWorker) -> None:
    """Longer than anybody waits for it; then it wakes up, with its old claim."""
    cell.outside(lambda: cell.cluster.stop(worker, HANGS_S))


def stops(cell: Cell, worker: VirtualWorker) -> None:
    worker.context.is_draining = True
    worker.process.spawn(worker.role.stop(), name="stop")


def nothing(cell: Cell, worker: VirtualWorker) -> None:
    pass


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    loop.run(story())
    assert not loop.errors


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("strike", [dies, hangs, stops])
def test_a_decode_worker_is_lost_and_another_one_fetches_what_is_held(point: str, strike: Strike) -> None:
    async def story() -> None:
        cell = Cell(point, strike)
        cell.start()
        await cell.answered()
        assert cell.hit is not None and cell.asked.run.attempt == 2
        assert cell.prefill.engine.num_computed == cell.num_refetched == len(PROMPT), "computed once"
        assert any(isinstance(message, Claim) for message in cell.messages)
        if strike is hangs:
            await asyncio.sleep(HANGS_S)
        await cell.end_idle()

    run(story)


@pytest.mark.parametrize("error", [QueueFull("no room"), InternalError("a mistake"), BackendFailed("no way")])
@pytest.mark.parametrize("point", ["decode.admit", "decode.reserved", "decode.granted"])
def test_a_decode_worker_that_refuses_or_fails_leaves_what_is_held_to_another_one(
    point: str, error: ServingError
) -> None:
    def fails(cell: Cell, worker: VirtualWorker) -> None:
        error.worker_id = worker.worker_id
        raise error

    async def story() -> None:
        cell = Cell(point, fails)
        cell.start()
        await cell.answered()
        assert cell.asked.run.attempt == 2
        assert cell.prefill.engine.num_computed == cell.num_refetched == len(PROMPT), "computed once"
        await cell.end_idle()

    run(story)


def test_a_claimant_that_was_deposed_is_told_and_gives_up_at_once() -> None:
    """Its reads hang; it would wait for them, and its release counts no more."""

    async def story() -> None:
        cell = Cell("decode.granted", nothing)
        cell.start()
        cell.on_post = lambda reader, peer, batch: (  # type: ignore[method-assign]
            Fault(delay_polls=-1) if cell.hit is not None and reader.incarnation == cell.hit.incarnation else None
        )
        assert await cell.cluster.until(lambda: cell.hit is not None, 5.0)
        assert cell.hit is not None
        first, other = cell.hit, next(each for each in cell.cluster.workers[1:] if each is not cell.hit)
        (export,) = cell.prefill.role.exports._exports.values()
        admit = t.AdmitRequest(
            request=replace(cell.asked.run.request, attempt=7),
            handoff_id=export.handoff_id,
            mode=t.Mode.SPLIT,
            worker_incarnation=other.incarnation,
            prefill=cell.prefill.address,
            is_held=True,
        )
        link = cell.cluster.peers.streams.link(other.address)
        await cell.cluster.gateway.spawn(link.ready())
        await cell.cluster.gateway.spawn(link.client.admit(admit))
        assert await cell.cluster.until(lambda: any(isinstance(one, Ended) for one in cell.messages), 1.0)
        ended = next(one for one in cell.messages if isinstance(one, Ended))
        assert (ended.attempt, ended.slug) == (1, "stale_lease")
        attempts = first.role._admissions.keys
        assert await cell.cluster.until(lambda: 1 not in {key.attempt for key in attempts()}, 0.1), "before they stall"
        await cell.answered()
        cell.cluster.fabric.resume()
        await cell.end_idle()

    run(story)


def test_what_is_held_is_given_back_when_the_client_leaves_while_nobody_fetches_it() -> None:
    async def story() -> None:
        cell = Cell("decode.granted", dies)
        cell.start(num_decodes=1)
        assert await cell.cluster.until(lambda: not cell.cluster.alive[1:], 5.0)
        await asyncio.sleep(0.2)
        assert not cell.prefill.is_idle() and cell.asked.task is not None
        cell.asked.task.cancel()
        await cell.end_idle()

    run(story)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_decode_worker_that_comes_later_fetches_what_is_held_as_long_as_the_lease_lasts(is_in_time: bool) -> None:
    """One that comes too late costs no attempt more: the prompt is computed again."""

    async def story() -> None:
        cell = Cell("decode.granted", dies)
        cell.start(num_decodes=1)
        assert await cell.cluster.until(lambda: not cell.cluster.alive[1:], 5.0)
        await asyncio.sleep(1.0 if is_in_time else 3.5)
        cell.cluster.start("decode-0", num_blocks=24)
        await cell.answered()
        assert cell.num_refetched == (len(PROMPT) if is_in_time else 0)
        assert cell.prefill.engine.num_computed == len(PROMPT) + (0 if is_in_time else 1), "but for what P has cached"
        assert cell.asked.run.attempt == (2 if is_in_time else 3)
        await cell.end_idle()

    run(story)


def test_a_holder_that_dies_too_is_replaced() -> None:
    def both_die(cell: Cell, worker: VirtualWorker) -> None:
        dies(cell, worker)
        cell.outside(lambda: cell.cluster.kill(cell.prefill))

    async def story() -> None:
        cell = Cell("decode.granted", both_die)
        cell.start()
        other = cell.cluster.start("prefill-1", num_blocks=24)
        cell.cluster.router.known.pop(other.worker_id)
        assert await cell.cluster.until(lambda: cell.prefill not in cell.cluster.alive, 5.0)
        cell.cluster.router.known[other.worker_id] = other
        await cell.answered()
        assert other.engine.num_computed == len(PROMPT) + 1, "token 1 was accepted"
        await cell.end_idle()

    run(story)
