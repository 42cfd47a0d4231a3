"""What ``baton doctor pair`` says, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baton.doctor import find, render, to_json
from core.errors import ConfigError, ServingError, WorkerLost
from core.handoff import LinkMeasure, PairCheck, TransferMode
from core.ids import WorkerId
from core.types import ClusterStatus, Role, WorkerState
from tests.unit.baton.test_status import STATUS, WORKER

READ = LinkMeasure(
    backend="nixl",
    mode=TransferMode.READ,
    lane="cma",
    is_used=True,
    connect_s=0.0031,
    latency_s=110e-6,
    bytes_per_s=4.1e9,
    memcpy_bytes_per_s=8.2e9,
)
DENIED = replace(
    READ, lane="tcp, emulated", is_used=False, bytes_per_s=0.0, slug="backend_failed", message="cma is denied"
)
CHECK = PairCheck(
    prefill=WorkerId("prefill-0"),
    decode=WorkerId("decode-0"),
    circuit="closed",
    circuit_why="",
    reason="nixl moves 4.10 GB/s",
    links=(READ,),
)


def cluster(state: WorkerState = WorkerState.READY) -> ClusterStatus:
    registration = replace(WORKER.registration, worker_id=WorkerId("prefill-0"), role=Role.PREFILL)
    prefill = replace(WORKER, registration=registration, state=state)
    return replace(STATUS, workers=(WORKER, prefill))


def test_a_good_pair_is_one_table_with_its_rate_beside_a_memcpy() -> None:
    head, table, verdict = render(CHECK).split("\n\n")
    assert head == "prefill-0 > decode-0  circuit closed"
    assert table.splitlines()[1].split() == [
        *("nixl", "read", "cma", "3.1", "ms", "110", "us", "4.10", "8.20", "50%", "used"),
    ]
    assert verdict == "nixl moves 4.10 GB/s"


def test_a_pair_without_a_usable_link_says_why() -> None:
    check = replace(CHECK, links=(DENIED,), circuit="open", circuit_why="no answer", reason="cma is denied")
    assert not check.is_good
    text = render(check)
    assert "circuit open (last failure: no answer)" in text and "backend_failed" in text
    assert text.endswith("no link is usable: cma is denied")


def test_the_json_form_is_complete() -> None:
    told = json.loads(json.dumps(to_json(CHECK)))
    assert told["is_good"] is True and told["links"][0]["bytes_per_s"] == 4.1e9 and told["links"][0]["mode"] == "read"


@pytest.mark.parametrize(
    ("worker_id", "role", "kind", "words"),
    [
        ("prefill-7", Role.PREFILL, ConfigError, "no worker 'prefill-7' is registered; prefill workers: prefill-0"),
        ("decode-0", Role.PREFILL, ConfigError, "decode-0 is a decode worker: name the prefill worker first"),
        ("prefill-0", Role.PREFILL, WorkerLost, "prefill-0 is lost: its last heartbeat is 0.1 s old"),
    ],
)
def test_what_is_no_live_pair_is_refused_with_what_to_do(
    worker_id: str, role: Role, kind: type[ServingError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        find(cluster(WorkerState.LOST), worker_id, role)
    assert words in caught.value.message


def test_a_draining_worker_can_be_examined() -> None:
    assert find(cluster(WorkerState.DRAINING), "prefill-0", Role.PREFILL).worker_id == "prefill-0"
