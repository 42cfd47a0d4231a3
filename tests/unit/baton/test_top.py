"""One screen about a running cluster."""

from __future__ import annotations

from dataclasses import replace

from baton.top import Look, render
from core.ids import Incarnation, RequestId, WorkerId
from core.kv import BlockCounts
from core.types import (
    ClusterStatus,
    ModelRecord,
    PoolStatus,
    RequestRecord,
    Role,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
    WorkerStatus,
)

MODEL = ModelRecord(name="m", format_hash="f", block_size=16, max_context=100, vocab_size=10)
BLOCKS = BlockCounts(total=100, custody=0, in_use=25, leased=0, cached=25, free=50)
LOAD = WorkerLoad(state=WorkerState.READY, num_running=2, blocks=BLOCKS, tokens_generated=100, busy_s=1.0)
REGISTRATION = WorkerRegistration(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation(1),
    role=Role.DECODE,
    model=MODEL,
    address="d:1",
    http_address="d:2",
    pid=1,
    hostname="h",
    num_blocks=100,
    block_bytes=16,
    max_sequences=8,
    max_step_tokens=64,
    transfer_backend="nixl",
)
RECORD = RequestRecord(
    request_id=RequestId("r"),
    model="m",
    outcome="stop",
    num_prompt_tokens=8,
    num_completion_tokens=11,
    num_cached_tokens=0,
    attempts=1,
    mode="split",
    prefill_worker="p",
    decode_worker="d",
    reason="",
    stages=(),
    ttft_s=0.2,
    duration_s=1.2,
    age_s=1.0,
)


def look(at: float, load: WorkerLoad, *records: RequestRecord, incarnation: int = 1) -> Look:
    registration = replace(REGISTRATION, incarnation=Incarnation(incarnation))
    worker = WorkerStatus(registration=registration, load=load, state=WorkerState.READY, heartbeat_age_s=0.0)
    status = ClusterStatus(
        router_incarnation=Incarnation(1),
        router_pid=1,
        router_http_address="r:1",
        pools=(PoolStatus(model="m", role=Role.DECODE, desired=2, ready=1, problem="no CPU is left"),),
        workers=(worker,),
        gateways=(),
        models=(MODEL,),
        num_placements=2,
        num_waiting=3,
    )
    return Look(at=at, status=status, records=records)


def test_rates_are_those_since_the_last_look() -> None:
    later = replace(
        LOAD, tokens_generated=400, prompt_tokens_computed=60, busy_s=2.0, kv_bytes_received=(("nixl", 4096),)
    )
    (row,) = [line for line in render(look(10.0, LOAD), look(12.0, later)).splitlines() if line.startswith("decode-0")]
    assert row.split() == ["decode-0", "ready", "2", "0", "25%", "50%", "30", "150", "2.0", "KiB"]


def test_a_restarted_worker_and_a_first_look_have_no_rates() -> None:
    for before in (None, look(10.0, replace(LOAD, tokens_generated=9999), incarnation=7)):
        (row,) = [line for line in render(before, look(12.0, LOAD)).splitlines() if line.startswith("decode-0")]
        assert row.split()[-4:] == ["-"] * 4


def test_latencies_are_those_of_requests_that_ended_lately() -> None:
    failed = replace(RECORD, outcome="no_worker", ttft_s=0.0)
    text = render(None, look(1.0, LOAD, RECORD, failed, replace(RECORD, age_s=99.0, ttft_s=9.0)))
    assert "0.0 requests/s answered, 1 not" in text
    assert "time to first token  200.0 ms" in text and "time per token       100.0 ms" in text
    assert "no CPU is left" in text and "3 waiting at the router" in text


def test_an_idle_cluster_is_shown_too() -> None:
    assert "whole request        -" in render(None, look(1.0, LOAD))
