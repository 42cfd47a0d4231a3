"""A prompt that waits for room at P: its reader may wait as long, and an abort ends it at once."""

import asyncio

import pytest

from core import types as t
from core.errors import Cancelled, ServingError, error_from_slug
from core.handoff import Refused, Sealed, ToHolder
from core.ids import RequestId
from tests.unit.prefill_worker.conftest import H, Rig


async def _handled(queue: "asyncio.Queue[ToHolder]") -> None:
    """What was sent has been taken in."""
    while not queue.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_the_reader_of_a_prompt_that_waits_for_room_waits_longer_than_a_lease_lasts(rig: Rig) -> None:
    pool = rig.context.engine.pool
    others = pool.reserve(pool.counts().free)
    call = asyncio.create_task(rig.prefill())
    rig.open()
    await _handled(rig.to_holder)
    rig.clock.advance(40.0)
    rig.role.exports.sweep()
    others.release()
    reply = await rig.next_reply()
    assert isinstance(reply, Sealed), reply
    assert (await call).first_tokens == reply.first_tokens
    assert rig.role.exports.end(H, Cancelled("the test is over"))


async def test_the_reader_of_a_prompt_that_never_comes_is_refused_after_a_lease_time(rig: Rig) -> None:
    rig.open()
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
