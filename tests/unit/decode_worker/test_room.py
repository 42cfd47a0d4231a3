"""Who gets the room of a decode worker: nobody is promised what running answers are about to need."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from core.clock import MonotonicClock
from core.config import parse_config
from core.errors import ContextTooLong, WorkerDraining
from core.failpoints import Failpoints
from core.ids import GatewayId, HandoffId, Incarnation, RequestId, WorkerId
from core.telemetry import Telemetry
from core.types import (
    AdmitReply,
    AdmitRequest,
    AdmitVerdict,
    ChoiceProgress,
    GenerateRequest,
    Mode,
    Role,
    SamplingParams,
)
from decode_worker.outbox import Outbox
from decode_worker.service import DecodeRole
from engine.engine import Engine, EngineConfig
from kvtransfer.digest import Digester
from tests.support.engine_runs import make_sequence
from tests.support.random_llama import RandomLlama
from worker.context import WorkerContext

FILES: Any = RandomLlama()
GATEWAY = Incarnation(5)


class Steps:
    """Runs commands at once: there is no step thread here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def call(self, command: Any) -> Any:
        return command(self._engine)


class Site:
    def __init__(self, policy: str = "fcfs") -> None:
        decode = {"policy": policy}
        config = parse_config(
            {"models": [{"name": "m", "pools": {"unified": decode}}], "worker": {"projected_tokens": 16}}
        )
        self.engine = Engine(FILES, EngineConfig(block_size=4, num_blocks=32, max_step_tokens=64, max_sequences=8))
        self.role = DecodeRole(
            WorkerContext(
                config=config,
                model=config.models[0],
                pool_config=config.models[0].pools[Role.UNIFIED],
                role=Role.UNIFIED,
                worker_id=WorkerId("unified-0"),
                incarnation=Incarnation(1),
                clock=MonotonicClock(),
                telemetry=Telemetry(component="unified-0"),
                failpoints=Failpoints({}),
                engine=self.engine,
                steps=cast(Any, Steps(self.engine)),
                digester=cast(Digester, None),
                on_broken=lambda reason: None,
            ),
            cast(Any, None),
            cast(Any, None),
        )
        self.role._outboxes[GATEWAY] = Outbox(GatewayId("g"), GATEWAY)

    async def admit(self, name: str, num_tokens: int, *, priority: int = 0, n: int = 1) -> AdmitReply:
        request = GenerateRequest(
            request_id=RequestId(name),
            model="m",
            prompt_token_ids=tuple(range(3, 3 + num_tokens)),
            sampling=SamplingParams(max_tokens=16, n=n),
            choices=tuple(ChoiceProgress(choice=choice) for choice in range(n)),
            gateway_id=GatewayId("g"),
            gateway_incarnation=GATEWAY,
            deadline_s=60,
            priority=priority,
        )
        return await self.role.admit(
            AdmitRequest(
                request=request, handoff_id=HandoffId(name), mode=Mode.LOCAL, worker_incarnation=Incarnation(1)
            )
        )


async def test_room_that_a_running_answer_is_projected_to_need_is_not_promised() -> None:
    site = Site()
    runs = make_sequence(range(3, 63), max_tokens=400, ignore_eos=True)  # 15 of 32 blocks, and 16 more soon
    site.engine.add(runs)
    site.engine.step()
    assert site.engine.num_growth_blocks == 16
    assert (await site.admit("a", 8)).verdict is AdmitVerdict.QUEUED
    assert site.engine.pool.counts().reserved == 0
    site.engine.remove(runs.key)
    assert (await site.admit("b", 8)) == AdmitReply(verdict=AdmitVerdict.QUEUED, num_ahead=1), "nobody overtakes"
    site.role._serve_queue()
    assert site.engine.pool.counts().reserved == 12 and not site.role._queue
    await site.role.stop()
    assert site.engine.pool.counts().is_idle()


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", ["low", "high", "low too"]), ("priority", ["high", "low", "low too"])]
)
async def test_the_line_at_d_goes_by_the_policy(policy: str, expected: list[str]) -> None:
    site = Site(policy)
    taken = site.engine.pool.allocate(32)
    for name, priority in (("low", 2), ("high", 1), ("low too", 2)):
        assert (await site.admit(name, 8, priority=priority)).verdict is AdmitVerdict.QUEUED
    assert [admission.key.request_id for admission in site.role._queue] == expected
    site.engine.pool.free(taken)
    await site.role.stop()
    assert site.engine.pool.counts().is_idle()


async def test_room_is_promised_for_every_choice_but_the_prompt_counts_once() -> None:
    site = Site()
    assert (await site.admit("one", 10)).verdict is AdmitVerdict.ACCEPTED
    assert site.engine.pool.counts().reserved == 7  # 26 tokens
    assert (await site.admit("four", 10, n=4)).verdict is AdmitVerdict.ACCEPTED
    assert site.engine.pool.counts().reserved == 7 + 7 + 3 * 5  # two blocks of the prompt are never written to
    assert (await site.admit("too many", 10, n=4)).verdict is AdmitVerdict.QUEUED
    with pytest.raises(ContextTooLong, match="the prompt and 40 choices need 42 KV blocks"):
        await site.admit("never", 10, n=40)
    await site.role.stop()
    assert site.engine.pool.counts().is_idle()


async def test_who_waits_for_room_is_handed_back_when_a_drain_begins_and_who_runs_is_not() -> None:
    site = Site()
    assert (await site.admit("runs", 60)).verdict is AdmitVerdict.ACCEPTED
    assert (await site.admit("waits", 60)).verdict is AdmitVerdict.QUEUED
    site.role._context.is_draining = True
    site.role.begin_drain()
    outbox = site.role._outboxes[GATEWAY]
    while not outbox._failed:
        await asyncio.sleep(0)
    assert [(failed.request_id, failed.slug, failed.worker_id) for failed in outbox._failed] == [
        ("waits", "worker_draining", "unified-0")
    ]
    assert [key.request_id for key in site.role._admissions] == ["runs"]
    await site.role.stop()
    assert {failed.slug for failed in outbox._failed} == {"worker_draining"} and len(outbox._failed) == 2
    assert site.engine.pool.counts().is_idle()


async def test_a_drain_that_begins_while_a_request_is_admitted_refuses_it() -> None:
    site = Site()
    site.role._context.failpoints.set("decode.admit", "pause:60")
    admitting = asyncio.create_task(site.admit("late", 8))
    await asyncio.sleep(0)
    site.role._context.is_draining = True
    site.role._context.failpoints.set("decode.admit", "")
    with pytest.raises(WorkerDraining):
        await admitting
    assert not site.role._admissions
    await site.role.stop()
    assert site.engine.pool.counts().is_idle()
