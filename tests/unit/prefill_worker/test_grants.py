"""What P grants to a claimant that holds the first blocks already."""

from __future__ import annotations

import pytest

from core.handoff import DigestKind, Grant
from prefill_worker.export import _grant_from
from tests.support.transfer_side import lease_ref

WHOLE = Grant(
    lease=lease_ref(1, 1),
    slot=0,
    block_ids=(7, 8, 9),
    first_block=0,
    num_tokens=40,
    digest=DigestKind.WSUM64,
    digests=bytes(range(3 * 2 * 8)),
)


@pytest.mark.parametrize("num_held", [0, 1, 3, 4, 2**31])
def test_the_rest_is_granted_with_its_digests(num_held: int) -> None:
    """However many blocks a claimant says it has: it never gets fewer than none."""
    rest = _grant_from(WHOLE, num_held, 2)
    first = min(num_held, 3)
    assert (rest.first_block, rest.block_ids) == (first, (7, 8, 9)[first:])
    assert rest.digests == WHOLE.digests[first * 16 :]
    assert (rest.lease, rest.num_tokens, rest.digest) == (WHOLE.lease, 40, DigestKind.WSUM64)
