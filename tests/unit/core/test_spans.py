"""The tracing seam: context by traceparent, one end, and nothing where nobody collects."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.errors import DigestMismatch
from core.telemetry import Telemetry, traced_telemetry

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUEST_ID = "0af7651916cd43dd8448eb211c80319c"


class Rig:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.telemetry = traced_telemetry("c", SimpleSpanProcessor(self.exporter))

    def only(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span

    def outcome(self) -> object:
        return (self.only().attributes or {})["baton.outcome"]


def test_where_nobody_collects_a_span_hands_its_parents_context_on() -> None:
    with Telemetry(component="c").begin("a", parent=PARENT, tokens=3) as span:
        span.set(more=1)
        span.link(PARENT)
        assert span.traceparent == PARENT
    assert Telemetry(component="c").begin("a").traceparent == ""


def test_a_child_continues_the_trace_under_a_span_of_its_own() -> None:
    rig = Rig()
    span = rig.telemetry.begin("a", parent=PARENT)
    assert span.traceparent.split("-")[1] == PARENT.split("-")[1] and span.traceparent != PARENT
    span.end()
    parent = rig.only().parent
    assert parent is not None and f"{parent.span_id:016x}" == PARENT.split("-")[2]


def test_a_caller_that_does_not_sample_is_not_traced_and_its_context_goes_on() -> None:
    rig = Rig()
    unsampled = PARENT[:-2] + "00"
    span = rig.telemetry.begin("a", parent=unsampled)
    span.end()
    assert not rig.exporter.get_finished_spans() and span.traceparent.endswith("-00")


def test_only_the_first_end_counts() -> None:
    rig = Rig()
    span = rig.telemetry.begin("a")
    span.end("expired", blocks=3)
    span.end()
    span.set(late=1)
    assert rig.outcome() == "expired" and "baton.late" not in (rig.only().attributes or {})


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DigestMismatch("x"), "digest_mismatch"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("x"), "internal_error"),
    ],
)
def test_what_leaves_the_block_is_the_outcome(error: BaseException, outcome: str) -> None:
    rig = Rig()
    with pytest.raises(type(error)), rig.telemetry.begin("a"):
        raise error
    assert rig.outcome() == outcome


def test_a_trace_begins_with_the_id_that_is_wanted_and_only_that_one() -> None:
    rig = Rig()
    first = rig.telemetry.begin("a", trace_id=REQUEST_ID)
    second = rig.telemetry.begin("b")
    assert first.traceparent.split("-")[1] == REQUEST_ID != second.traceparent.split("-")[1]


@pytest.mark.parametrize("text", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT[:-3]])
def test_an_unreadable_context_begins_a_trace_and_links_nothing(text: str) -> None:
    rig = Rig()
    span = rig.telemetry.begin("a", parent=text)
    span.link(text)
    span.end()
    assert rig.only().parent is None and not rig.only().links
