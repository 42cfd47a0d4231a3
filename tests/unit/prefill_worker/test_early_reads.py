"""What P announces of a prompt while it computes the rest."""

from __future__ import annotations

import asyncio

import pytest

from core import types as t
from core.errors import Cancelled, LeaseExpired
from core.handoff import Ended, Ready, Sealed
from core.ids import HandoffId, RequestId
from engine.engine import StepResult
from engine.sequence import SequenceKey
from kvtransfer.digest import DIGEST_BYTES
from tests.unit.prefill_worker.conftest import H, Rig

NUM_TOKENS = 22
"""Two chunks of two blocks, and one of which the last block is not full."""
KEY = SequenceKey(request_id=RequestId("r"), attempt=1, choice=0)


async def _announced(rig: Rig, num_blocks: int) -> None:
    async with asyncio.timeout(10):
        while (export := rig.role.exports._exports.get(H)) is None or len(export.early) < num_blocks:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_held", [0, 1, 3])
async def test_complete_blocks_are_announced_before_they_are_digested_and_granted_at_the_end(
    rig: Rig, num_held: int
) -> None:
    rig.context.failpoints.set("prefill.announced", "pause:60")
    rig.open(num_held_blocks=num_held)
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    announced: dict[int, int] = {}
    while len(announced) < 5 - num_held:
        ready = await rig.next_reply()
        assert isinstance(ready, Ready)
        announced |= dict(enumerate(ready.block_ids, ready.first_block))
    assert rig.role.exports.digests.num_made == 0, "nobody waits for the digests of what can move"
    rig.context.failpoints.set("prefill.announced", "")
    reply = await rig.next_reply()
    assert isinstance(reply, Sealed) and (await call).first_tokens == reply.first_tokens
    grant = reply.grant
    assert list(announced) == list(range(num_held, 5)), "not the last block: it is not full"
    assert grant.first_block == num_held and grant.block_ids[: 5 - num_held] == tuple(announced.values())
    assert len(grant.digests) == (6 - num_held) * rig.context.geometry.num_kv_heads * DIGEST_BYTES
    assert rig.role.exports.digests.num_made == 6, "each block once"
    assert rig.role.exports.end(H, Cancelled("the test is over"))


async def test_a_reader_that_comes_late_is_told_of_everything_so_far(rig: Rig) -> None:
    rig.context.failpoints.set("worker.step", "after:2:pause:60")
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    await _announced(rig, 4)
    rig.open(num_held_blocks=1)
    reply = await rig.next_reply()
    assert isinstance(reply, Ready) and (reply.first_block, len(reply.block_ids)) == (1, 3)
    counts = rig.context.engine.pool.counts()
    assert counts.in_use == 6 and counts.leased == 0, "a block counts once"
    rig.context.failpoints.set("worker.step", "")
    assert isinstance(reply := await rig.next_reply(), Ready) and reply.first_block == 4
    assert isinstance(await rig.next_reply(), Sealed)
    await call
    assert rig.role.exports.end(H, Cancelled("the test is over"))


async def test_announced_blocks_of_an_aborted_prompt_come_back(rig: Rig) -> None:
    rig.context.failpoints.set("worker.step", "after:2:pause:60")
    rig.open()
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    await _announced(rig, 4)
    aborting = asyncio.create_task(
        rig.role.abort_prefill(t.AbortRequest(request_id=RequestId("r"), attempt=1, reason="not wanted"))
    )
    await asyncio.sleep(0)
    rig.context.failpoints.set("worker.step", "")
    assert (await aborting).found
    with pytest.raises(Cancelled):
        await call
    while isinstance(reply := await rig.next_reply(), Ready):
        pass
    assert isinstance(reply, Ended)
    assert rig.role.is_idle()


async def test_a_preempted_prompt_ends_its_hand_off_because_its_blocks_were_announced(rig: Rig) -> None:
    rig.context.failpoints.set("worker.step", "after:2:pause:60")
    rig.open()
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    await _announced(rig, 4)
    sequence = rig.context.engine.find(KEY)
    assert sequence is not None
    rig.role.on_step(StepResult(preempted=(sequence,)), 0.0, 0.0)
    assert rig.role.exports._exports == {}, "nobody can read the blocks any more, before they are used again"
    rig.context.failpoints.set("worker.step", "")
    with pytest.raises(LeaseExpired, match="preempted"):
        await call
    assert rig.role.is_idle()


async def test_a_prompt_that_ends_at_its_first_token_leaves_nothing(rig: Rig) -> None:
    rig.open()
    reply = await rig.prefill(num_tokens=NUM_TOKENS, max_tokens=1)
    assert reply.first_tokens[0].finish_reason is t.FinishReason.LENGTH
    while isinstance(message := await rig.next_reply(), Ready):
        pass
    assert isinstance(message, Ended) and rig.role.is_idle()


async def test_blocks_from_the_prefix_cache_are_announced_and_not_digested_again(rig: Rig) -> None:
    await rig.prefill(num_tokens=NUM_TOKENS)
    assert rig.role.exports.end_request(RequestId("r"), 1, Cancelled("the test is over"))
    made = rig.role.exports.digests.num_made
    rig.open(attempt=2, handoff_id=HandoffId("other"))
    call = asyncio.create_task(rig.prefill(attempt=2, num_tokens=NUM_TOKENS, handoff_id=HandoffId("other")))
    assert isinstance(reply := await rig.next_reply(), Ready) and len(reply.block_ids) == 5
    assert isinstance(reply := await rig.next_reply(), Sealed) and len(reply.grant.block_ids) == 6
    await call
    assert rig.role.exports.digests.num_made == made + 1, "the block that is not full"
    assert rig.role.exports.end(HandoffId("other"), Cancelled("the test is over"))


@pytest.mark.parametrize("point", ["prefill.announced", "prefill.digested"])
async def test_a_failure_to_digest_early_leaves_it_to_the_seal(rig: Rig, point: str) -> None:
    rig.context.failpoints.set(point, "error:internal_error")
    rig.open()
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    while isinstance(reply := await rig.next_reply(), Ready):
        pass
    assert isinstance(reply, Sealed) and len(reply.grant.block_ids) == 6
    await call
    assert rig.role.exports.end(H, Cancelled("the test is over"))


async def test_nothing_is_announced_where_early_reads_are_off(rig: Rig) -> None:
    transfer = rig.context.config.transfer.model_copy(update={"early_reads": False})
    rig.context.config = rig.context.config.model_copy(update={"transfer": transfer})
    rig.open()
    call = asyncio.create_task(rig.prefill(num_tokens=NUM_TOKENS))
    assert isinstance(await rig.next_reply(), Sealed)
    await call
    assert rig.role.exports.end(H, Cancelled("the test is over"))
