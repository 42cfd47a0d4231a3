"""A prompt that waits for room at P: its reader may wait as long, and an abort ends it at once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from core import types as t
from core.clock import ManualClock
from core.config import load_config
from core.errors import Cancelled, ServingError, error_from_slug
from core.failpoints import Failpoints
from core.handoff import DigestKind, Hello, LinkInfo, Open, PeerInfo, Refused, Sealed, ToHolder, ToReader, Welcome
from core.ids import GatewayId, HandoffId, Incarnation, RequestId, WorkerId
from core.telemetry import Telemetry
from engine.engine import Engine, EngineConfig
from kvtransfer.digest import Digester
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import REGION_KV
from kvtransfer.slot import SlotMemory
from prefill_worker.service import PrefillRole
from tests.support.random_llama import RandomLlama
from worker.context import WorkerContext
from worker.step_thread import StepThread

H = HandoffId("h")
INCARNATION = Incarnation(5)


@dataclass
class Rig:
    """One prefill worker without its sockets, under a manual clock, and one reader's control stream."""

    clock: ManualClock
    context: WorkerContext
    role: PrefillRole
    to_holder: "asyncio.Queue[ToHolder]"
    replies: AsyncIterator[ToReader]

    async def prefill(self, *, attempt: int = 1) -> t.PrefillReply:
        request = t.GenerateRequest(
            request_id=RequestId("r"),
            model=self.context.model.name,
            prompt_token_ids=(3, 4, 5),
            sampling=t.SamplingParams(temperature=0.0, max_tokens=8),
            gateway_id=GatewayId("g"),
            gateway_incarnation=Incarnation(7),
            deadline_s=60.0,
            attempt=attempt,
        )
        return await self.role.prefill(t.PrefillRequest(request=request, handoff_id=H, worker_incarnation=INCARNATION))

    async def next_reply(self) -> ToReader:
        async with asyncio.timeout(10):
            return await anext(self.replies)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    config = load_config(environ={})
    engine = Engine(RandomLlama(), EngineConfig(num_blocks=8, block_size=4))
    loop = asyncio.get_running_loop()
    role: PrefillRole
    steps = StepThread(
        engine,
        on_step=lambda *step: loop.call_soon_threadsafe(role.on_step, *step),
        on_death=lambda error: None,
        failpoints=Failpoints(),
    )
    clock, geometry = ManualClock(), engine.geometry
    context = WorkerContext(
        on_broken=lambda error: None,
        config=config,
        model=config.models[0],
        pool_config=config.models[0].pools[t.Role.PREFILL],
        role=t.Role.PREFILL,
        worker_id=WorkerId("prefill-0"),
        incarnation=INCARNATION,
        clock=clock,
        telemetry=Telemetry(component="prefill-0"),
        failpoints=Failpoints(),
        engine=engine,
        steps=steps,
        digester=Digester.at_address(DigestKind.WSUM64, geometry, engine.kv_region.address),
    )
    region = (REGION_KV, engine.kv_region.address, geometry.num_blocks * geometry.block_bytes)
    link = LinkInfo(backend="nixl", agent_name="a", metadata=b"", regions=(region,))

    def peer(worker_id: str, incarnation: int) -> PeerInfo:
        return PeerInfo(
            worker_id=WorkerId(worker_id),
            incarnation=Incarnation(incarnation),
            format=engine.format,
            geometry=geometry,
            link=link,
        )

    leases = LeaseTable(
        SlotMemory(4), block_bytes=geometry.block_bytes, lease_s=15.0, quota_bytes=8 * geometry.block_bytes
    )
    role = PrefillRole(context, leases, peer("prefill-0", 5))
    queue: asyncio.Queue[ToHolder] = asyncio.Queue()
    queue.put_nowait(Hello(peer=peer("decode-0", 9)))

    async def messages() -> AsyncIterator[ToHolder]:
        while True:
            yield await queue.get()

    steps.start()
    replies = role.connect(messages())
    assert isinstance(await anext(replies), Welcome)
    yield Rig(clock, context, role, queue, replies)
    await replies.aclose()
    await role.stop()
    await asyncio.to_thread(steps.stop)
    assert engine.pool.counts().is_idle()


async def _handled(queue: "asyncio.Queue[ToHolder]") -> None:
    """What was sent has been taken in."""
    while not queue.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_the_reader_of_a_prompt_that_waits_for_room_waits_longer_than_a_lease_lasts(rig: Rig) -> None:
    pool = rig.context.engine.pool
    others = pool.reserve(pool.counts().free)
    call = asyncio.create_task(rig.prefill())
    rig.to_holder.put_nowait(Open(handoff_id=H, request_id=RequestId("r"), attempt=1))
    await _handled(rig.to_holder)
    rig.clock.advance(40.0)
    rig.role.exports.sweep()
    others.release()
    reply = await rig.next_reply()
    assert isinstance(reply, Sealed), reply
    assert (await call).first_tokens == reply.first_tokens
    assert rig.role.exports.end(H, Cancelled("the test is over"))


async def test_the_reader_of_a_prompt_that_never_comes_is_refused_after_a_lease_time(rig: Rig) -> None:
    rig.to_holder.put_nowait(Open(handoff_id=H, request_id=RequestId("r"), attempt=1))
    await _handled(rig.to_holder)
    rig.clock.advance(16.0)
    rig.role.exports.sweep()
    reply = await rig.next_reply()
    assert isinstance(reply, Refused)
    assert isinstance(error_from_slug(reply.slug, reply.message), ServingError)


async def test_an_abort_ends_a_prompt_that_waits_for_room_at_once(rig: Rig) -> None:
    pool = rig.context.engine.pool
    others = pool.reserve(pool.counts().free)
    call = asyncio.create_task(rig.prefill())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        abort = t.AbortRequest(request_id=RequestId("r"), attempt=1, reason="not wanted any more")
        assert (await rig.role.abort_prefill(abort)).found
    with pytest.raises(Cancelled, match="not wanted"):
        await call
    others.release()


async def test_a_seal_that_fails_gives_the_blocks_and_the_lease_back(rig: Rig) -> None:
    rig.context.failpoints.set("prefill.seal", "error:internal_error")
    with pytest.raises(ServingError):
        await rig.prefill()
    assert rig.role.is_idle()
