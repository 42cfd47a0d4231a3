"""Claims at P that come again, too early, or after somebody else's."""

from __future__ import annotations

import pytest

from core.errors import Cancelled
from core.handoff import HandoffOutcome, Ready, Refused, Release, Sealed, ToReader
from core.ids import WorkerId
from tests.unit.prefill_worker.conftest import H, Rig


async def _sealed(rig: Rig) -> Sealed:
    reply: ToReader = await rig.next_reply()
    while isinstance(reply, Ready):
        reply = await rig.next_reply()
    assert isinstance(reply, Sealed)
    return reply


async def test_a_hand_off_that_never_begins_is_refused_in_time_however_often_it_is_asked_for(rig: Rig) -> None:
    """The wait counts from the first Open."""
    lease_s = rig.context.config.transfer.lease_s
    for _ in range(3):
        rig.open()
        await rig.settle()
        rig.clock.advance(lease_s / 3)
    rig.role.exports.sweep()
    reply = await rig.next_reply()
    assert isinstance(reply, Refused) and (reply.attempt, reply.slug) == (1, "lease_expired")


async def test_a_claim_that_comes_again_is_answered_again_and_counts_once(rig: Rig) -> None:
    rig.open()
    await rig.prefill()
    first = await _sealed(rig)
    rig.open()
    assert await _sealed(rig) == first
    assert rig.context.pairs.counts()[WorkerId("decode-0")].num_handoffs == 1
    assert rig.role.exports.end(H, Cancelled("the test is over"))


@pytest.mark.parametrize("outcome", list(HandoffOutcome))
async def test_the_outcome_says_whether_the_lease_or_the_claim_is_over(rig: Rig, outcome: HandoffOutcome) -> None:
    rig.open()
    await rig.prefill()
    sealed = await _sealed(rig)
    rig.to_holder.put_nowait(Release(handoff_id=H, lease=sealed.grant.lease, attempt=1, outcome=outcome))
    await rig.settle()
    assert rig.role.is_idle() == outcome.ends_lease
    rig.open(attempt=2)
    reply = await rig.next_reply()
    if outcome.ends_lease:
        assert isinstance(reply, Refused) and reply.attempt == 2
        return
    assert isinstance(reply, Sealed) and reply.attempt == 2
    rig.to_holder.put_nowait(Release(handoff_id=H, lease=sealed.grant.lease, attempt=2, outcome=HandoffOutcome.OK))
    await rig.settle()
    assert rig.role.is_idle() and rig.role.exports.refetched_tokens == 3
