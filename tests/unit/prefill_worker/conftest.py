"""A prefill worker without its sockets, and one reader's control stream."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from core import types as t
from core.clock import ManualClock
from core.config import load_config
from core.failpoints import Failpoints
from core.handoff import DigestKind, Hello, LinkInfo, Open, PeerInfo, ToHolder, ToReader, Welcome
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

    async def prefill(
        self, *, attempt: int = 1, num_tokens: int = 3, max_tokens: int = 8, handoff_id: HandoffId = H
    ) -> t.PrefillReply:
        request = t.GenerateRequest(
            request_id=RequestId("r"),
            model=self.context.model.name,
            prompt_token_ids=tuple(range(3, 3 + num_tokens)),
            sampling=t.SamplingParams(temperature=0.0, max_tokens=max_tokens),
            gateway_id=GatewayId("g"),
            gateway_incarnation=Incarnation(7),
            deadline_s=60.0,
            attempt=attempt,
        )
        return await self.role.prefill(
            t.PrefillRequest(request=request, handoff_id=handoff_id, worker_incarnation=INCARNATION)
        )

    def open(self, *, attempt: int = 1, num_held_blocks: int = 0, handoff_id: HandoffId = H) -> None:
        """The reader asks for the hand-off."""
        self.to_holder.put_nowait(
            Open(
                handoff_id=handoff_id,
                request_id=RequestId("r"),
                attempt=attempt,
                num_held_blocks=num_held_blocks,
            )
        )

    async def settle(self) -> None:
        """What was told the holder is done."""
        while not self.to_holder.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def next_reply(self) -> ToReader:
        async with asyncio.timeout(10):
            return await anext(self.replies)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    config = load_config(environ={})
    engine = Engine(RandomLlama(), EngineConfig(num_blocks=8, block_size=4, max_step_tokens=8, max_sequences=4))
    loop = asyncio.get_running_loop()
    role: PrefillRole
    failpoints = Failpoints()
    steps = StepThread(
        engine,
        on_step=lambda *step: loop.call_soon_threadsafe(role.on_step, *step),
        on_death=lambda error: None,
        failpoints=failpoints,
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
        failpoints=failpoints,
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
