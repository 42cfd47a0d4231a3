"""What /metrics tells of pairs, and that its labels are bounded."""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.clock import ManualClock
from core.ids import Incarnation, WorkerId
from kvtransfer.backends.base import Link
from kvtransfer.backends.inproc import Fabric
from kvtransfer.fetch import FetchRequest, pinned_future
from kvtransfer.pairs import OTHER, Pairs
from kvtransfer.transfer_loop import TransferLoop
from tests.support.transfer_side import Side
from worker.pair_metrics import PairCollector

OWN = {"model": "m", "role": "decode"}
P = WorkerId("P")


class Worker:
    def __init__(self) -> None:
        fabric = Fabric()
        self.p, self.d = Side(fabric.backend(), "P"), Side(fabric.backend(), "D")
        self.pairs = Pairs()
        self.loop: TransferLoop = self.d.loop(ManualClock(), pairs=self.pairs)
        self.registry = CollectorRegistry()
        self.registry.register(PairCollector(OWN, self.pairs, cast(Any, self.loop)))

    def read(self, num_blocks: int) -> None:
        link: Any = pinned_future()
        self.loop.connect(self.p.peer, link)
        while not link.done():
            self.loop.turn()
        _, grant = self.p.seal(f"h{num_blocks}", list(range(num_blocks)))
        request = FetchRequest(
            transfer_id=num_blocks,
            remote_blocks=grant.block_ids,
            local_blocks=grant.block_ids,
            lease=grant.lease,
            slot=grant.slot,
            deadline_s=9.0,
        )
        found: Link = link.result(0)
        work = self.loop.begin(found, request)
        self.loop.fetch(work)
        while not work.transfer.result.done():
            self.loop.turn()

    def value(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                if sample.name == f"baton_kv_pair_{name}" and labels.items() <= sample.labels.items():
                    assert OWN.items() <= sample.labels.items()
                    return sample.value
        raise KeyError(name)


def test_bytes_operations_and_the_measured_link_are_told_by_peer() -> None:
    worker = Worker()
    worker.read(3)
    worker.read(4)
    assert worker.value("bytes_total", peer="P") == 7 * worker.p.geometry.block_bytes
    assert worker.value("operations_total", peer="P") == 4, "a chunk and a slot, twice"
    assert worker.value("bytes_per_second", peer="P", backend="inproc", mode="read") > 0
    assert worker.value("link_used", peer="P", backend="inproc") == 1


def test_failures_and_the_circuit_are_told_by_slug_and_state() -> None:
    worker = Worker()
    worker.pairs.count_failure(P, "digest_mismatch")
    circuit = worker.pairs.circuit(P, Incarnation(7))
    assert worker.value("circuit", peer="P", state="closed") == 1
    for _ in range(3):
        circuit.fail(circuit.begin(), "no", 0.0)
    assert worker.value("failures_total", peer="P", slug="digest_mismatch") == 1
    assert worker.value("circuit", peer="P", state="open") == 1
    assert worker.value("circuit", peer="P", state="closed") == 0
    assert worker.value("circuit_openings_total", peer="P") == 1


def test_a_worker_that_met_a_thousand_peers_tells_of_a_bounded_number_and_loses_no_byte() -> None:
    worker = Worker()
    for number in range(1000):
        worker.pairs.count(WorkerId(f"p{number}"), num_bytes=10)
        worker.pairs.circuit(WorkerId(f"p{number}"), Incarnation(number + 1))
    counts = worker.pairs.counts()
    assert len(counts) <= 65 and sum(each.num_bytes for each in counts.values()) == 10_000
    assert worker.value("bytes_total", peer=OTHER) == 10 * (1000 - len(counts) + 1)
    assert len(worker.pairs.circuits()) <= 64
    with pytest.raises(KeyError):
        worker.value("bytes_total", peer="p0")
