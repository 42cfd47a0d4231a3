"""Whatever goes wrong, each span ends once, with an outcome of a closed set."""

from __future__ import annotations

from collections import Counter

import pytest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

import tests.support.virtual.cluster as virtual_cluster
from core.errors import ERRORS_BY_SLUG
from core.handoff import HandoffOutcome
from core.telemetry import traced_telemetry
from tests.faults.inject import run_cases

KINDS = (
    "bits flipped",
    "operation fails",
    "operation hangs",
    "message lost",
    "stream breaks",
    "client gone",
    "torn read",
)
OUTCOMES = {*ERRORS_BY_SLUG, *map(str, HandoffOutcome), "expired", "revoked"}


class Counting(SpanProcessor):
    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()

    def on_start(self, span: Span, parent_context: object = None) -> None:
        self.begun[span.name] += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.ended[span.name, str((span.attributes or {})["baton.outcome"])] += 1


def test_every_span_ends_once_with_an_outcome_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    monkeypatch.setattr(virtual_cluster, "_TELEMETRY", traced_telemetry("virtual", counting))
    tally = run_cases(range(30_000, 30_080), KINDS)
    assert not tally.damage, tally.table()
    totals: Counter[str] = Counter()
    for (name, outcome), count in counting.ended.items():
        assert outcome in OUTCOMES, (name, outcome)
        totals[name] += count
    assert totals == counting.begun
    assert {"prefill", "kv.hold", "decode", "kv.handoff", "kv.open", "kv.transfer"} <= set(totals)
    failed = {outcome for (name, outcome) in counting.ended if name == "kv.transfer"}
    assert {"ok", "digest_mismatch", "backend_failed", "aborted"} <= failed, failed
