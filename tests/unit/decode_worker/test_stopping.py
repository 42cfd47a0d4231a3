"""A decode worker that is stopped while requests are ending."""

from __future__ import annotations

import asyncio

from bench.virtual.loop import VirtualLoop
from core.types import AbortRequest
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.worker import VirtualWorker


class Reached(Hooks):
    def __init__(self, name: str) -> None:
        self.name, self.event = name, asyncio.Event()

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == self.name:
            self.event.set()


def test_a_stop_waits_for_those_that_are_ending_and_their_room_is_given_back() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        hooks = Reached("decode.opened")
        cluster = VirtualCluster(config=make_config(), hooks=hooks, seed=0)
        cluster.start("prefill-0", num_blocks=16)
        decode = cluster.start("decode-0", num_blocks=16)
        asked = cluster.ask((3, 4, 5, 6, 7), max_tokens=3)
        await hooks.event.wait()
        abort = AbortRequest(request_id=asked.request.request_id, attempt=1, reason="not wanted any more")
        aborting = decode.process.spawn(decode.role.abort_decode(abort))
        while decode.role._admissions:
            await asyncio.sleep(0)
        assert decode.engine.pool.counts().reserved, "it is still ending"
        await decode.process.spawn(decode.role.stop())
        assert decode.engine.pool.counts().is_idle()
        assert (await aborting).found
        cluster.kill(decode)
        await cluster.until(lambda: asked.is_over, 30.0)
        await cluster.close()

    loop.run(main())
    assert not loop.errors
