"""How fast a queue is served, from what was placed while somebody waited."""

import pytest

from router.drain_rate import MIN_SPAN_S, WINDOW_S, DrainRate


def test_nothing_is_known_before_something_was_served() -> None:
    rate = DrainRate()
    rate.waiting(True, 0.0)
    assert rate.per_s(5.0) is None


def test_the_gap_before_the_first_end_of_a_burst_does_not_count() -> None:
    """A hundred come at once, fill every place, and end from the third second on."""
    rate = DrainRate()
    rate.waiting(True, 0.0)
    for number in range(20):
        rate.note(10.0, 3.0 + number / 10)
    assert rate.per_s(5.0) == pytest.approx(100.0, rel=0.06)


def test_over_the_window_every_pause_counts() -> None:
    rate = DrainRate()
    rate.waiting(True, 0.0)
    for second in range(20, 30):
        rate.note(10.0, second + 0.5)
    assert rate.per_s(30.0) == pytest.approx(100.0 / WINDOW_S)


def test_what_was_known_is_kept_while_nobody_waits_and_forgotten_at_last() -> None:
    rate = DrainRate()
    rate.waiting(True, 0.0)
    rate.note(10.0, 1.0)
    rate.note(10.0, 2.0)
    rate.waiting(False, 2.0 + MIN_SPAN_S)
    assert rate.per_s(3.0) == pytest.approx(10.0 / (1.0 + MIN_SPAN_S))
    assert not rate.is_over(3.0)
    assert rate.is_over(2.0 + WINDOW_S + 1)


def test_what_others_had_meanwhile_is_counted_from_when_one_waits() -> None:
    queue, lane = DrainRate(), DrainRate()
    queue.note(1.0, 0.5)
    lane.waiting(True, 1.0)
    queue.note(1.0, 1.5)
    queue.note(1.0, 2.0)
    assert queue.num_since_waiting(lane) == 2
    lane.waiting(False, 3.0)
    assert queue.num_since_waiting(lane) == 0
