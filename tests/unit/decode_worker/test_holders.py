"""Which start of a prefill worker a decode worker believes in."""

from __future__ import annotations

from typing import Any

from bench.virtual.loop import VirtualLoop
from bench.virtual.network import Pipe
from core.handoff import PeerInfo, Welcome
from kvtransfer.backends.base import Batch, Identity
from kvtransfer.backends.inproc import Fault
from kvtransfer.memory import REGION_CANARY
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.worker import VirtualWorker


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


class SpoiltCanary(Hooks):
    """Whatever is read of the canary has a wrong byte, as long as it is so."""

    is_spoilt = True

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        return Fault(flip=(3, 1)) if self.is_spoilt and batch.remote_region == REGION_CANARY else None


def test_both_sides_of_a_new_pair_say_why_they_are_not_ready_until_the_canary_is_read() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        hooks = SpoiltCanary()
        cluster = VirtualCluster(config=make_config(), hooks=hooks, seed=0)
        decode = cluster.start("decode-0", num_blocks=16)
        prefill = cluster.start("prefill-0", num_blocks=16)
        sides = [decode.context.proof, prefill.context.proof]
        decode.process.run(lambda: _meet(decode, prefill))
        prefill.process.run(lambda: _meet(prefill, decode))
        assert await cluster.until(lambda: all("announced" in (side.why_not or "") for side in sides), 5.0)
        assert "prefill-0: no link" in (sides[0].why_not or "") and "decode-0: no link" in (sides[1].why_not or "")
        hooks.is_spoilt = False
        assert await cluster.until(lambda: not any(side.why_not for side in sides), 5.0)
        await cluster.close()

    loop.run(main())
    assert not loop.errors


def _meet(worker: VirtualWorker, peer: VirtualWorker) -> None:
    """As the router would have them."""
    worker.context.proof.meet((peer.address,))
    worker.role.meet((peer.address,))
