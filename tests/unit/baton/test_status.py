"""What ``baton status`` shows."""

from __future__ import annotations

import json
from dataclasses import replace

from baton.pools import describe_drain
from baton.status import format_bytes, render, table, to_json
from core.ids import GatewayId, Incarnation, WorkerId
from core.kv import BlockCounts
from core.types import (
    ClusterStatus,
    ExecutionKind,
    GatewayStatus,
    ModelRecord,
    PoolStatus,
    Role,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
    WorkerStatus,
)

MODEL = ModelRecord(name="m", format_hash="f", block_size=16, max_context=8192, vocab_size=49152)
WORKER = WorkerStatus(
    registration=WorkerRegistration(
        worker_id=WorkerId("decode-0"),
        incarnation=Incarnation(0xABC),
        role=Role.DECODE,
        model=MODEL,
        address="127.0.0.1:1",
        http_address="127.0.0.1:2",
        pid=42,
        hostname="h",
        num_blocks=10,
        block_bytes=1024,
        max_sequences=64,
        max_step_tokens=2048,
        transfer_backend="nixl",
    ),
    load=WorkerLoad(
        state=WorkerState.READY,
        blocks=BlockCounts(total=10, custody=1, in_use=2, leased=0, cached=0, free=7, reserved=3),
        kv_bytes_received=(("nixl", 3 << 20),),
    ),
    state=WorkerState.READY,
    heartbeat_age_s=0.1234567,
)
STATUS = ClusterStatus(
    router_incarnation=Incarnation(2**62 + 1),
    router_pid=41,
    router_http_address="127.0.0.1:3",
    pools=(PoolStatus(model="m", role=Role.DECODE, desired=1, ready=1),),
    workers=(WORKER,),
    gateways=(
        GatewayStatus(
            gateway_id=GatewayId("g"),
            incarnation=Incarnation(5),
            http_address="127.0.0.1:8000",
            pid=43,
            num_requests=2,
            heartbeat_age_s=0.1,
        ),
    ),
    models=(MODEL,),
    num_placements=1,
    num_waiting=0,
)


def test_the_json_form_has_what_a_script_needs() -> None:
    data = json.loads(json.dumps(to_json(STATUS)))
    (worker,) = data["workers"]
    assert worker["kv_bytes_received"] == {"nixl": 3 << 20}
    assert worker["blocks"]["custody"] == 1
    assert (worker["pid"], worker["role"], worker["state"]) == (42, "decode", "ready")
    assert worker["incarnation"] == "0000000000000abc"
    assert data["router"]["incarnation"] == "4000000000000001"
    assert data["pools"] == [{"model": "m", "role": "decode", "desired": 1, "ready": 1, "problem": ""}]


def test_the_tables_fit_a_terminal() -> None:
    text = render(STATUS)
    assert "1 custody, 2 use of 10" in text
    assert "3.0 MiB nixl" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_a_drain_and_what_a_pool_lacks_are_shown() -> None:
    load = replace(WORKER.load, drain_left_s=12.3, num_running=3, num_transfers=1)
    worker = replace(WORKER, state=WorkerState.DRAINING, load=load, next_role=Role.PREFILL)
    pool = PoolStatus(model="m", role=Role.DECODE, desired=2, ready=1, problem="decode-1: no CPU is free")
    text = render(replace(STATUS, workers=(worker,), pools=(pool,)))
    assert "draining 12 s -> prefill" in text
    assert "! m decode: decode-1: no CPU is free" in text
    assert describe_drain(worker) == "decode-0 finishes: 3 running, 1 in transfer; hands back what is left in 12 s"
    assert describe_drain(replace(worker, load=replace(WORKER.load, drain_left_s=1.0))) == "decode-0 has finished"


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert table(("A", "B"), [("long", "x")]) == "A     B\nlong  x"


def test_sizes_are_told_in_the_largest_fitting_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "5120.0 GiB",
    ]


def test_a_model_whose_answers_are_made_up_is_shown_as_such() -> None:
    mock = replace(STATUS, models=(replace(MODEL, execution=ExecutionKind.MOCK),))
    assert "MOCK EXECUTION: no model is run, all answers of m are made up" in render(mock)
    assert "MOCK" not in render(STATUS)
    models = to_json(mock)["models"]
    assert isinstance(models, list) and models[0]["execution"] == "mock"
