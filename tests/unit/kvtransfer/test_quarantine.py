"""When a quarantine is told of, and when it costs the worker its process."""

from __future__ import annotations

from kvtransfer.custody import CustodyEnd, CustodyStats
from kvtransfer.quarantine import QuarantineWatch, Verdict


def quarantine(num_blocks: int, *, since: float = 0.0, ended: int = 0) -> CustodyStats:
    return CustodyStats(
        num_transfers=1,
        num_blocks=num_blocks,
        num_quarantined_transfers=1 if num_blocks else 0,
        num_quarantined_blocks=num_blocks,
        oldest_quarantine_at=since if num_blocks else None,
        ended=((CustodyEnd.TERMINAL, ended),),
    )


def test_a_small_quarantine_that_drains_soon_is_no_news() -> None:
    watch = QuarantineWatch(100)
    assert [watch.look(quarantine(4), now) for now in (0.0, 10.0, 29.0)] == [Verdict.QUIET] * 3
    assert watch.look(quarantine(0), 30.0) is Verdict.QUIET and watch.num_alarms == 0


def test_one_that_grows_or_gets_old_is_told_of_once_a_minute() -> None:
    watch = QuarantineWatch(100)
    assert watch.look(quarantine(5), 0.0) is Verdict.ALARM
    assert watch.look(quarantine(9), 1.0) is Verdict.QUIET
    assert watch.look(quarantine(1), 61.0) is Verdict.ALARM
    assert watch.look(quarantine(0), 62.0) is Verdict.QUIET
    assert watch.look(quarantine(1, since=62.0), 92.0) is Verdict.ALARM, "a new one is told of at once"
    assert watch.num_alarms == 3


def test_a_tenth_of_the_pool_without_progress_for_a_minute_costs_the_process() -> None:
    watch = QuarantineWatch(100)
    watch.look(quarantine(10), 0.0)
    assert watch.look(quarantine(10), 59.0) is Verdict.QUIET
    assert watch.look(quarantine(10, ended=1), 60.0) is Verdict.ALARM, "something ended: there is hope"
    assert watch.look(quarantine(10, ended=1), 119.0) is Verdict.QUIET
    assert watch.look(quarantine(10, ended=1), 120.0) is Verdict.RESTART


def test_a_single_block_that_never_comes_back_does_too_in_the_end() -> None:
    watch = QuarantineWatch(1000)
    verdicts = [watch.look(quarantine(1, ended=now), float(now)) for now in range(601)]
    assert verdicts[-1] is Verdict.RESTART and Verdict.RESTART not in verdicts[:-1]
