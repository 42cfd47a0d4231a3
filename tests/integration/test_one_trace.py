"""One trace through a request: gateway, router, prefill, both ends of the transfer, decode; whoever listens, or not."""

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.handoff import HandoffOutcome
from core.telemetry import Telemetry, traced_telemetry
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(120)
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROMPT = "The capital of France is"


class Down(SpanExporter):
    """A collector that is not there."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise ConnectionError("no collector")

    def shutdown(self) -> None: ...


def traced(exporter: SpanExporter) -> dict[str, Telemetry]:
    components = ("gateway", "router", "prefill-0", "decode-0")
    return {name: traced_telemetry(name, SimpleSpanProcessor(exporter)) for name in components}


def told(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[f"baton.{name}"]


async def _spans(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """By name, once ``count`` have ended: P's hold ends after the answer."""
    async with asyncio.timeout(10):
        while len(exporter.get_finished_spans()) < count:
            await asyncio.sleep(0.005)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert len(spans) == count == len(exporter.get_finished_spans()), [span.name for span in spans.values()]
    return spans


def _parent(span: ReadableSpan) -> int:
    return 0 if span.parent is None else span.parent.span_id


async def test_a_split_request_is_one_complete_tree(engines: dict[str, Engine]) -> None:
    exporter = InMemorySpanExporter()
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=traced(exporter)) as cluster:
        await cluster.complete(PROMPT, max_tokens=4, headers={"traceparent": GIVEN})
        spans = await _spans(exporter, 8)
    assert {span.context.trace_id for span in spans.values() if span.context} == {int(GIVEN[3:35], 16)}
    ids = {name: span.context.span_id for name, span in spans.items() if span.context}
    assert _parent(spans["request"]) == int(GIVEN[36:52], 16)
    tree = {
        "placement": "request",
        "prefill": "request",
        "kv.hold": "prefill",
        "decode": "request",
        "kv.handoff": "decode",
        "kv.open": "kv.handoff",
        "kv.transfer": "kv.handoff",
    }
    assert {name: _parent(spans[name]) for name in tree} == {name: ids[above] for name, above in tree.items()}
    assert {told(span, "outcome") for span in spans.values()} == {"ok"}
    components = {name: told(span, "component") for name, span in spans.items()}
    assert [components[name] for name in ("request", "placement")] == ["gateway", "router"]
    assert components["kv.hold"] == "prefill-0" and components["kv.transfer"] == "decode-0"
    transfer, hold = spans["kv.transfer"], spans["kv.hold"]
    assert told(transfer, "backend") == "nixl" and told(transfer, "mode") == "read" and told(transfer, "retries") == 0
    assert told(transfer, "bytes") == told(hold, "bytes") != 0 and told(transfer, "peer") == "prefill-0"
    assert [link.context.span_id for link in transfer.links] == [ids["kv.hold"]]
    assert [link.context.span_id for link in hold.links] == [ids["kv.handoff"]]
    stages = {key: value for key, value in (spans["request"].attributes or {}).items() if ".stage." in key}
    started, ended = spans["request"].start_time, spans["request"].end_time
    assert started and ended and stages
    assert sum(float(str(value)) for value in stages.values()) == pytest.approx(1e-9 * (ended - started), abs=0.05)


async def test_without_a_callers_context_the_trace_has_the_id_of_the_request(engines: dict[str, Engine]) -> None:
    exporter = InMemorySpanExporter()
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=traced(exporter)) as cluster:
        answer = await cluster.complete(PROMPT, max_tokens=2)
        spans = await _spans(exporter, 8)
    root = spans["request"]
    assert root.parent is None and root.context is not None
    assert f"{root.context.trace_id:032x}" in answer["id"]


async def test_a_hand_off_that_fails_says_so_in_its_own_span_and_the_retry_is_a_sibling(
    engines: dict[str, Engine],
) -> None:
    exporter = InMemorySpanExporter()
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=traced(exporter)) as cluster:
        await cluster.complete(PROMPT, max_tokens=1)
        cluster.workers["decode-0"].context.failpoints.set("decode.granted", "error:digest_mismatch")
        exporter.clear()
        answering = asyncio.create_task(cluster.complete("Rome is the capital of", max_tokens=2))
        async with asyncio.timeout(10):
            while not any(span.name == "kv.transfer" for span in exporter.get_finished_spans()):
                await asyncio.sleep(0.005)
        cluster.workers["decode-0"].context.failpoints.set("decode.granted", "")
        await answering
        transfers = [span for span in exporter.get_finished_spans() if span.name == "kv.transfer"]
    outcomes = [told(span, "outcome") for span in transfers]
    assert outcomes[0] == "digest_mismatch" and set(map(str, outcomes)) <= {str(each) for each in HandoffOutcome}
    assert len({span.context.trace_id for span in transfers if span.context}) == 1


async def test_an_exporter_that_is_down_costs_no_request(engines: dict[str, Engine]) -> None:
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=traced(Down())) as cluster:
        answer = await cluster.complete(PROMPT, max_tokens=4)
        assert len(answer["choices"][0]["token_ids"]) == 4
        async with asyncio.timeout(10):
            while not all(worker.role.is_idle() for worker in cluster.workers.values()):
                await asyncio.sleep(0.005)
