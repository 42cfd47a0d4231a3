"""Which start of a prefill worker a decode worker believes in."""

from __future__ import annotations

from typing import Any

from core.handoff import Welcome
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.network import Pipe


class LateWelcome(Hooks):
    """The first Welcome comes a second late."""

    is_over = False

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        if isinstance(message, Welcome) and not self.is_over:
            self.is_over = True
            return [(message, 0.8)]
        return [(message, 0.0)]


def test_a_worker_that_hung_and_answers_late_does_not_depose_its_successor() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        cluster = VirtualCluster(config=make_config(), hooks=LateWelcome(), seed=0)
        cluster.start("decode-0", num_blocks=16)
        old = cluster.start("prefill-0", num_blocks=16)
        first = cluster.ask((3, 4, 5, 6, 7), max_tokens=3)
        await cluster.until(lambda: bool(first.tokens), 1.0)
        new = cluster.start("prefill-0", num_blocks=16)
        second = cluster.ask((8, 9, 10), max_tokens=3)
        assert await cluster.until(lambda: first.is_over and second.is_over, 10.0)
        assert second.error is None and second.run.attempt == 1
        assert first.error is None and first.run.attempt == 2, "the late Welcome was not believed"
        third = cluster.ask((3, 4), max_tokens=3)
        assert await cluster.until(lambda: third.is_over, 10.0)
        assert third.error is None and third.run.attempt == 1
        assert new.role.is_idle()
        cluster.kill(old)
        await cluster.close()

    loop.run(main())
    assert not loop.errors
