"""Where the time of a hand-off went, as D tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from core.handoff import HandoffOutcome, TransferMode
from core.ids import Incarnation
from core.types import Mode
from decode_worker.intake import Admission, AdmissionState
from kvtransfer.fetch import FetchResult, FetchTimes

FETCH = FetchResult(
    transfer_id=1,
    outcome=HandoffOutcome.OK,
    detail="",
    backend="nixl",
    mode=TransferMode.READ,
    num_bytes=100,
    early_bytes=60,
    num_copies=1,
    snapshot=None,
    is_data_complete=True,
    times=FetchTimes(late_post_s=0.2, late_move_s=0.1, slot_s=0.05),
)
MARKS = {AdmissionState.FETCHING: 10.0, "arrived": 10.5, "verified": 10.75, AdmissionState.RUNNING: 11.0}


def admission(fetch: FetchResult) -> Admission:
    asked = cast(Any, type("Asked", (), {"mode": Mode.SPLIT})())
    made = Admission(
        asked=asked, gateway=Incarnation(1), deadline_at=99.0, rank=(0, 1), num_blocks=1, num_blocks_apart=0
    )
    made.fetch, made.marks = fetch, {**MARKS, "first_token": 12.0}
    return made


def parts(made: Admission) -> list[float]:
    times = made.stages(12.0, 0)
    split = [times.transfer_wait_s, times.transfer_post_s, times.transfer_move_s, times.transfer_verify_s]
    assert sum(split) + times.transfer_publish_s == pytest.approx(times.transfer_s) == 1.0
    return split


def test_the_parts_of_a_transfer_sum_to_it() -> None:
    assert parts(admission(FETCH)) == pytest.approx([0.15, 0.2, 0.1, 0.05 + 0.25])


def test_clocks_of_two_threads_that_disagree_make_no_negative_part() -> None:
    late = replace(FETCH, times=FetchTimes(late_post_s=0.4, late_move_s=0.3, slot_s=0.2))
    assert parts(admission(late)) == pytest.approx([0.0, 0.4, 0.1, 0.0 + 0.25])
