"""A prefill worker that is stopped while a hand-off is being sealed."""

from __future__ import annotations

import asyncio

from bench.virtual.loop import VirtualLoop
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config


def test_a_stop_between_the_first_token_and_the_lease_leaves_no_block_leased() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        cluster = VirtualCluster(config=make_config(), hooks=Hooks(), seed=0)
        prefill = cluster.start("prefill-0", num_blocks=16)
        cluster.start("decode-0", num_blocks=16)
        asked = cluster.ask((3, 4, 5, 6, 7), max_tokens=3)
        while not any(attempt.firsts[0].done() for attempt in prefill.role._attempts.values()):
            await asyncio.sleep(1e-5)
        await asyncio.sleep(1e-5)
        prefill.context.is_draining = True
        await prefill.process.spawn(prefill.role.stop())
        await asyncio.sleep(0.01)
        assert prefill.engine.pool.counts().is_idle(), prefill.engine.pool.counts()
        cluster.kill(prefill)
        await cluster.until(lambda: asked.is_over, 30.0)
        await cluster.close()

    loop.run(main())
    assert not loop.errors
