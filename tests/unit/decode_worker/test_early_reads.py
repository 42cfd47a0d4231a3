"""Whatever ends a request while its blocks move early, nothing of it stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.virtual.loop import VirtualLoop
from bench.virtual.network import Pipe
from core.errors import InternalError
from core.handoff import Ready
from tests.support.virtual.cluster import Answer, Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import answer_to
from tests.support.virtual.worker import VirtualWorker

PROMPT = tuple(range(3, 43))
"""Three steps of P."""
DECODE_POINTS = ("decode.ready", "decode.digested")
POINTS = ("prefill.announced", "prefill.digested", *DECODE_POINTS)


class Strike(Hooks):
    """What a test does when a failpoint is first reached."""

    def __init__(self, point: str) -> None:
        self.point, self.num_ready = point, 0
        self.is_error = False
        self.leaves: Answer | None = None

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        self.num_ready += isinstance(message, Ready)
        return [(message, 0.0)]

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == self.point:
            self.point = ""
            if self.leaves is not None and self.leaves.task is not None:
                self.leaves.task.cancel()
                await asyncio.sleep(0.01)
            if self.is_error:
                raise InternalError("injected")


async def _started(hooks: Hooks) -> VirtualCluster:
    cluster = VirtualCluster(config=make_config(), hooks=hooks, seed=0)
    cluster.start("prefill-0", num_blocks=24)
    cluster.start("decode-0", num_blocks=24)
    return cluster


async def _end_idle(cluster: VirtualCluster) -> None:
    """Laws 1 and 2, well before any lease time could have cleaned up."""
    assert await cluster.until(lambda: all(worker.is_idle() for worker in cluster.alive), 1.0)
    await cluster.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_client_leaves_while_blocks_move_early(point: str) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        hooks = Strike(point)
        cluster = await _started(hooks)
        hooks.leaves = cluster.ask(PROMPT, max_tokens=4)
        assert await cluster.until(lambda: hooks.point == "", 5.0), "the failpoint was reached"
        await _end_idle(cluster)

    loop.run(main())
    assert not loop.errors


@pytest.mark.parametrize("point", DECODE_POINTS)
def test_a_failure_while_blocks_move_early_is_borne(point: str) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        hooks = Strike(point)
        hooks.is_error = True
        cluster = await _started(hooks)
        cluster.start("decode-1", num_blocks=24)
        asked = cluster.ask(PROMPT, max_tokens=4)
        assert await cluster.until(lambda: asked.is_over, 10.0)
        assert asked.tokens == answer_to(PROMPT, 4) and asked.run.attempt == 2
        await _end_idle(cluster)

    loop.run(main())


def test_a_request_that_ends_at_token_1_drops_its_early_reads() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        hooks = Strike("")
        cluster = await _started(hooks)
        asked = cluster.ask(PROMPT, max_tokens=1)
        assert await cluster.until(lambda: asked.is_over, 5.0)
        assert asked.tokens == answer_to(PROMPT, 1) and hooks.num_ready
        await _end_idle(cluster)

    loop.run(main())
    assert not loop.errors
