import pytest

from kvtransfer.custody import Custody, CustodyEnd
from tests.support.transfer_side import RecordingPool


def test_blocks_are_pinned_until_the_transfer_is_quiet_and_counted_by_cause() -> None:
    pool = RecordingPool()
    custody = Custody(pool)
    custody.begin(1, [3, 4])
    custody.begin(2, [7])
    assert pool.pinned == {3, 4, 7}
    custody.quarantine(1, now=5.0)
    custody.quarantine(1, now=9.0)
    stats = custody.stats()
    assert (stats.num_transfers, stats.num_blocks) == (2, 3)
    assert (stats.num_quarantined_transfers, stats.num_quarantined_blocks, stats.oldest_quarantine_at) == (1, 2, 5.0)
    custody.end(1, CustodyEnd.PEER_DEAD)
    custody.end(2, CustodyEnd.COMPLETE)
    assert pool.pinned == set()
    stats = custody.stats()
    assert (stats.num_transfers, stats.num_quarantined_blocks, stats.oldest_quarantine_at) == (0, 0, None)
    assert {why: count for why, count in stats.ended if count} == {CustodyEnd.PEER_DEAD: 1, CustodyEnd.COMPLETE: 1}


def test_custody_ends_exactly_once() -> None:
    custody = Custody(RecordingPool())
    custody.begin(1, [3])
    with pytest.raises(ValueError, match="custody already"):
        custody.begin(1, [4])
    custody.end(1, CustodyEnd.COMPLETE)
    with pytest.raises(KeyError):
        custody.end(1, CustodyEnd.COMPLETE)
    custody.quarantine(1, now=0.0)
    assert custody.stats().num_quarantined_transfers == 0


def test_a_transfer_takes_more_blocks_until_it_is_quiet() -> None:
    pool = RecordingPool()
    custody = Custody(pool)
    custody.begin(1, [4])
    assert custody.extend(1, [5, 6]) and pool.pinned == {4, 5, 6}
    custody.end(1, CustodyEnd.COMPLETE)
    assert not custody.extend(1, [7]) and pool.pinned == set()
