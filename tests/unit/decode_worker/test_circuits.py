"""A pair that keeps failing is left alone, by the router and by D itself, until its canary is read again."""

from __future__ import annotations

import asyncio

from bench.virtual.loop import VirtualLoop
from core.errors import BackendFailed
from core.handoff import PeerInfo
from core.types import WorkerLoad, WorkerState
from kvtransfer.backends.base import Batch, Identity
from kvtransfer.backends.inproc import Fault
from kvtransfer.circuit import CircuitState
from kvtransfer.memory import REGION_CANARY, REGION_KV
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.worker import VirtualWorker


class BadCable(Hooks):
    """What is read from ``prefill-0`` of these regions arrives with a wrong byte."""

    def __init__(self) -> None:
        self.regions: set[str] = set()

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        is_hit = peer.worker_id == "prefill-0" and batch.remote_region in self.regions
        return Fault(flip=(3, 1)) if is_hit else None


class Site:
    def __init__(self) -> None:
        self.hooks = BadCable()
        self.cluster = VirtualCluster(config=make_config(), hooks=self.hooks, seed=0)
        self.decode = self.cluster.start("decode-0", num_blocks=16)
        self.prefill = self.cluster.start("prefill-0", num_blocks=16)

    async def ask(self, number: int) -> int:
        """The attempts that a request needed."""
        answer = self.cluster.ask((number % 59, number // 59, 5, 7, 9), max_tokens=2)
        assert await self.cluster.until(lambda: answer.is_over, 10.0) and answer.error is None
        return answer.run.attempt

    async def break_it(self) -> VirtualWorker:
        """Hand-offs from ``prefill-0`` fail until its circuit opens; another prefill worker answers them."""
        other = self.cluster.start("prefill-1", num_blocks=16)
        self.hooks.regions = {REGION_KV}
        for number in range(30):
            await self.ask(number)
            if self.broken():
                return other
        raise AssertionError("the circuit never opened")

    def broken(self) -> list[str]:
        """As the router hears it."""
        load = WorkerLoad(state=WorkerState.READY, blocks=self.decode.engine.pool.counts())
        return [worker_id for worker_id, _ in self.decode.role.fill_load(load).broken_pairs]


def run(scenario: object) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        site = Site()
        await scenario(site)  # type: ignore[operator]
        await site.cluster.close()

    loop.run(main())
    assert not loop.errors


def test_after_failures_in_a_row_nothing_is_begun_with_that_holder() -> None:
    async def scenario(site: Site) -> None:
        await site.break_it()
        site.hooks.regions |= {REGION_CANARY}
        assert site.broken() == ["prefill-0"]
        assert [await site.ask(1000 + number) for number in range(5)] == [1] * 5
        counts = site.decode.context.pairs.counts()
        assert counts["prefill-0"].failures == {"digest_mismatch": 3} and not counts["prefill-1"].failures
        assert sum(each.num_retries for each in counts.values()) == 3

    run(scenario)


def test_d_refuses_what_was_placed_before_the_router_heard_of_it() -> None:
    async def scenario(site: Site) -> None:
        await site.break_it()
        try:
            with site.decode.role._holders.hand_off(site.prefill.address):
                raise AssertionError("it began")
        except BackendFailed as error:
            assert error.worker_id == "prefill-0" and "digest" in error.message

    run(scenario)


def test_its_canary_is_read_after_a_time_and_brings_it_back() -> None:
    async def scenario(site: Site) -> None:
        other = await site.break_it()
        site.hooks.regions.clear()
        assert await site.cluster.until(lambda: not site.broken(), 1.0)
        site.cluster.kill(other)
        assert await site.ask(2000) >= 1
        circuit = site.decode.context.pairs.circuits()[site.prefill.worker_id]
        assert circuit.state is CircuitState.CLOSED and circuit.num_openings == 1

    run(scenario)


def test_a_canary_that_is_wrong_keeps_it_open_for_longer_and_longer() -> None:
    async def scenario(site: Site) -> None:
        await site.break_it()
        site.hooks.regions |= {REGION_CANARY}
        circuit = site.decode.context.pairs.circuits()[site.prefill.worker_id]
        assert await site.cluster.until(lambda: circuit.num_openings == 4, 4.0), "0.2 + 0.4 + 0.8 s, and the probes"
        assert "canary" in circuit.why and site.broken()
        site.hooks.regions.clear()
        assert await site.cluster.until(lambda: not site.broken(), 4.0)

    run(scenario)


def test_nothing_goes_on_for_a_holder_that_does_not_come_back() -> None:
    async def scenario(site: Site) -> None:
        await site.break_it()
        site.cluster.kill(site.prefill)
        assert await site.cluster.until(lambda: not site.decode.context.pairs.circuits().get("prefill-0"), 600.0)
        await asyncio.sleep(0)
        assert not site.broken()

    run(scenario)
