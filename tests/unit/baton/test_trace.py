"""The waterfall of a request in a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.trace import EARLY_BAR, MIN_WIDTH, STAGE_BAR, render
from core.ids import RequestId
from core.types import RequestRecord, StageInterval, StageTimes, TransferChunk

RECORD = RequestRecord(
    request_id=RequestId("abc"),
    model="m",
    outcome="stop",
    num_prompt_tokens=640,
    num_completion_tokens=8,
    num_cached_tokens=0,
    attempts=2,
    mode="split",
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    reason="least_loaded",
    stages=(("admission", 0.1), ("prefill", 0.4), ("retry", 0.1), ("decode", 0.4)),
    ttft_s=0.5,
    duration_s=1.0,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    timeline=(
        StageInterval(stage="admission", start_s=0.0, duration_s=0.1),
        StageInterval(stage="prefill", start_s=0.1, duration_s=0.4, attempt=1, worker="prefill-0"),
        StageInterval(stage="retry", start_s=0.5, duration_s=0.1, attempt=1),
        StageInterval(stage="decode", start_s=0.6, duration_s=0.4, attempt=2, worker="decode-0"),
    ),
    times=StageTimes(
        transfer_chunks=(
            TransferChunk(
                attempt=2,
                start_s=0.2,
                duration_s=0.1,
                num_bytes=1 << 20,
                first_block=0,
                num_blocks=8,
                num_descriptors=1,
                is_early=True,
            ),
        )
    ),
)


@pytest.mark.parametrize("width", [20, 64, 100, 240])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    lines = render(RECORD, width).splitlines()
    assert max(map(len, lines)) <= max(width, MIN_WIDTH)


def test_bars_stand_where_the_stages_were() -> None:
    lines = {line.split("  ")[0].strip(): line for line in render(RECORD, 100).splitlines() if STAGE_BAR in line}
    assert list(lines) == ["admission", "prefill #1", "retry #1", "decode #2"]
    starts = [line.index(STAGE_BAR) for line in lines.values()]
    lengths = [line.count(STAGE_BAR) for line in lines.values()]
    assert starts == sorted(starts)
    assert [start + length for start, length in zip(starts[:-1], lengths[:-1], strict=True)] == pytest.approx(
        starts[1:], abs=1
    )
    assert "400.0 ms  decode-0" in lines["decode #2"]


def test_chunks_of_the_kv_say_what_moved_and_when() -> None:
    (line,) = [line for line in render(RECORD, 100).splitlines() if EARLY_BAR in line]
    assert line.startswith("  kv 0-7 ") and "1.0 MiB 0.01 GB/s early" in line


def test_a_request_that_never_came_anywhere_is_shown_too() -> None:
    text = render(replace(RECORD, timeline=(), times=None, traceparent="", ttft_s=0.0, duration_s=0.0), 80)
    assert "no token came" in text and "trace" not in text
