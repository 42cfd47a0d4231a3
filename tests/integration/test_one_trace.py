"""One trace through a request: gateway, router, prefill, both ends of the transfer, decode; over a real OTLP hop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from core import semconv
from core.handoff import HandoffOutcome
from core.telemetry import Telemetry, traced_telemetry
from core.types import RequestRecord
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.collector import Collector, Told, open_collector
from tests.support.local_cluster import MODEL, LocalCluster

pytestmark = pytest.mark.timeout(120)
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROMPT = "The capital of France is"
COMPONENTS = ("gateway", "router", "prefill-0", "decode-0")
TREE = {
    "admission": "root",
    "admission.limits": "root",
    "tokenize": "root",
    "attempt": "root",
    "stream": "root",
    "route.client": "attempt",
    "route": "route.client",
    "prefill.client": "attempt",
    "prefill": "prefill.client",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "kv.hold": "prefill",
    "kv.publish": "kv.hold",
    "decode.client": "attempt",
    "decode": "decode.client",
    "kv.wait": "decode",
    "kv.handoff": "decode",
    "kv.open": "kv.handoff",
    "kv.transfer": "kv.handoff",
    "kv.transfer.chunk": "kv.transfer",
    "kv.commit": "decode",
    "decode.first_step": "decode",
    "decode.generate": "decode",
}
"""Of a split request, by parent."""


class Down(SpanExporter):
    """A collector that is not there."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise ConnectionError("no collector")

    def shutdown(self) -> None: ...


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with open_collector() as one:
        yield one


def _cluster(collector: Collector, engines: dict[str, Engine], *overrides: str) -> LocalCluster:
    return LocalCluster(
        lambda worker_id: NixlBackend(), *overrides, engines=engines, telemetries=collector.telemetries(*COMPONENTS)
    )


def _key(span: Told) -> str:
    """Calls are told by both sides under one name."""
    if span.component == "gateway" and span.name in ("route", "prefill", "decode"):
        return f"{span.name}.client"
    return "root" if span.name.startswith("text_completion ") else span.name


def _by_key(spans: list[Told]) -> dict[str, Told]:
    keyed = {_key(span): span for span in spans}
    assert len(keyed) == len(spans), sorted(map(_key, spans))
    return keyed


async def _record(cluster: LocalCluster, *, num_requests: int = 1) -> RequestRecord:
    """Of the last one."""
    async with asyncio.timeout(60):
        while len(found := (await cluster.router.find_records("")).records) < num_requests:
            await asyncio.sleep(0.01)
    return found[0]


def _check_root(root: Told, record: RequestRecord) -> None:
    """The stages of the root sum to its length, and are those of the record."""
    stages = {key: float(str(value)) for key, value in root.attributes.items() if ".stage." in key}
    assert sum(stages.values()) == pytest.approx(root.seconds, abs=1e-3)
    assert {f"baton.stage.{stage}_s": seconds for stage, seconds in record.stages} == pytest.approx(stages)
    assert root.seconds == pytest.approx(record.duration_s, abs=1e-3) and root.trace_id == record.trace_id
    ends = [0.0, *(one.start_s + one.duration_s for one in record.timeline)]
    assert [one.start_s for one in record.timeline] == pytest.approx(ends[:-1], abs=1e-6)


async def test_a_split_request_is_one_complete_tree(collector: Collector, engines: dict[str, Engine]) -> None:
    async with _cluster(collector, engines) as cluster:
        headers = {"traceparent": GIVEN, "x-baton-timing": "1"}
        answer = await cluster.complete(PROMPT, max_tokens=4, headers=headers)
        spans = _by_key(await collector.until("stream", "kv.hold", "decode.generate", "attempt", "kv.transfer"))
        record = await _record(cluster)
    assert {span.trace_id for span in spans.values()} == {GIVEN[3:35]}
    assert spans["root"].parent_id == GIVEN[36:52]
    ids = {name: span.span_id for name, span in spans.items()}
    assert {name: span.parent_id for name, span in spans.items() if name != "root"} == {
        name: ids[above] for name, above in TREE.items()
    }
    assert {span.said("outcome") for span in spans.values()} == {"ok"}
    components = {name: spans[name].component for name in ("root", "route", "kv.publish", "kv.transfer.chunk")}
    assert list(components.values()) == ["gateway", "router", "prefill-0", "decode-0"]
    transfer, hold, chunk, publish = (
        spans[name] for name in ("kv.transfer", "kv.hold", "kv.transfer.chunk", "kv.publish")
    )
    assert (
        transfer.said("backend") == "nixl" and transfer.said("mode") == "read" and transfer.said("direction") == "pull"
    )
    assert transfer.said("retries") == 0 and transfer.said("transport") and transfer.said("peer") == "prefill-0"
    assert transfer.said("bytes") == hold.said("bytes") == chunk.said("bytes") == publish.said("bytes") != 0
    assert chunk.said("blocks") == publish.said("blocks") == 1 and int(str(chunk.said("descriptors"))) >= 1
    assert float(str(chunk.said("gb_per_s"))) > 0 and float(str(transfer.said("verify_s"))) >= 0
    assert {transfer.said("peer_incarnation"), transfer.said("incarnation")} == {
        f"{worker.context.incarnation:016x}" for worker in cluster.workers.values()
    }
    assert chunk.links == (publish.span_id,) and publish.span_id in transfer.links
    assert hold.links == (ids["kv.handoff"],)
    root = spans["root"]
    assert root.name == f"text_completion {MODEL}" and root.attributes[semconv.RESPONSE_FINISH_REASONS] == ["length"]
    assert root.attributes[semconv.USAGE_OUTPUT_TOKENS] == 4 and root.attributes[semconv.PROVIDER] == "baton"
    assert not any(name.startswith("gen_ai.input") for name in root.attributes), "no text without being asked for"
    _check_root(root, record)
    assert record.times is not None and len(record.times.transfer_chunks) == 1
    moved = record.times.transfer_chunks[0]
    assert (moved.num_bytes, moved.num_blocks) == (chunk.said("bytes"), chunk.said("blocks"))
    assert moved.duration_s == pytest.approx(chunk.seconds, abs=1e-5)
    assert 0 < moved.start_s < moved.start_s + moved.duration_s <= record.duration_s
    told = answer["timing"]
    assert sum(told["stages_ms"].values()) == pytest.approx(told["total_ms"], abs=0.1)
    assert told["trace_id"] == GIVEN[3:35] and told["total_ms"] <= 1e3 * record.duration_s


async def test_each_chunk_of_a_long_prompt_is_told_by_both_sides(
    collector: Collector, engines: dict[str, Engine]
) -> None:
    """Blocks move while the prompt is computed: each announcement is a span, and what reads it is linked to it."""
    small_steps = "models.0.pools.prefill.max_step_tokens=64"
    async with _cluster(collector, {"decode-0": engines["decode-0"]}, small_steps) as cluster:
        await cluster.complete(list(range(100, 300)), max_tokens=2)
        spans = await collector.until("kv.hold", "decode.generate", "kv.transfer", "attempt", "stream")
    published = {span.span_id: span for span in spans if span.name == "kv.publish"}
    chunks = [span for span in spans if span.name == "kv.transfer.chunk"]
    hold = next(span for span in spans if span.name == "kv.hold")
    transfer = next(span for span in spans if span.name == "kv.transfer")
    assert len(published) >= 3 and {span.parent_id for span in published.values()} == {hold.span_id}
    assert {span.parent_id for span in chunks} == {transfer.span_id}
    for side in (published.values(), chunks):
        assert sum(int(str(span.said("blocks"))) for span in side) == 13
        assert sum(int(str(span.said("bytes"))) for span in side) == transfer.said("bytes")
    assert all(len(span.links) == 1 and span.links[0] in published for span in chunks)
    assert len({span.trace_id for span in spans}) == 1


async def test_without_a_callers_context_the_trace_has_the_id_of_the_request(
    collector: Collector, engines: dict[str, Engine]
) -> None:
    async with _cluster(collector, engines) as cluster:
        answer = await cluster.complete(PROMPT, max_tokens=2)
        spans = _by_key(await collector.until("stream", f"text_completion {MODEL}"))
    assert not spans["root"].parent_id and spans["root"].trace_id in answer["id"]


async def test_a_retry_is_a_sibling_that_is_linked_to_the_attempt_that_failed(
    collector: Collector, engines: dict[str, Engine]
) -> None:
    async with _cluster(collector, engines) as cluster:
        await cluster.complete(PROMPT, max_tokens=1)
        collector.received.clear()
        failpoints = cluster.workers["decode-0"].context.failpoints
        failpoints.set("decode.granted", "error:digest_mismatch")
        answering = asyncio.create_task(cluster.complete("Rome is the capital of", max_tokens=2))
        spans: list[Told] = []
        while not any(span.name == "kv.transfer" and span.said("outcome") == "digest_mismatch" for span in spans):
            spans = await collector.until()
            await asyncio.sleep(0.005)
        failpoints.set("decode.granted", "")
        await answering
        spans = await collector.until(f"text_completion {MODEL}", "kv.hold", "decode.generate")
        record = await _record(cluster, num_requests=2)
    root = next(span for span in spans if _key(span) == "root" and span.trace_id == record.trace_id)
    spans = [span for span in spans if span.trace_id == root.trace_id]
    attempts = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.start_s)
    assert len(attempts) == record.attempts >= 2 and {span.parent_id for span in attempts} == {root.span_id}
    assert [span.links for span in attempts] == [(), *((before.span_id,) for before in attempts[:-1])]
    assert [span.said("attempt") for span in attempts] == list(range(1, len(attempts) + 1))
    outcomes = [str(span.said("outcome")) for span in attempts]
    assert set(outcomes[:-1]) == {"digest_mismatch"} and outcomes[-1] == "ok"
    assert attempts[0].attributes[semconv.ERROR_TYPE] == "digest_mismatch"
    transfers = sorted((span for span in spans if span.name == "kv.transfer"), key=lambda span: span.start_s)
    assert {str(span.said("outcome")) for span in transfers} <= {str(each) for each in HandoffOutcome}
    assert [span.said("retries") for span in transfers] == list(range(len(transfers)))
    _check_root(root, record)
    assert dict(record.stages)["retry"] > 0 and {one.attempt for one in record.timeline} >= {0, 1, record.attempts}


async def test_a_cancelled_request_ends_every_span_and_its_stages_sum_up(
    collector: Collector, engines: dict[str, Engine]
) -> None:
    async with _cluster(collector, engines) as cluster:
        step = cluster.workers["decode-0"].context.failpoints
        step.set("decode.granted", "pause:60")
        asking = asyncio.create_task(cluster.complete(PROMPT, max_tokens=8))
        async with asyncio.timeout(60):
            while not step.num_hits("decode.granted"):
                await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        step.set("decode.granted", "")
        spans = _by_key(
            await collector.until(f"text_completion {MODEL}", "kv.hold", "kv.transfer", "decode", "attempt")
        )
        record = await _record(cluster)
    root = spans["root"]
    assert (
        record.outcome == root.said("outcome") == "cancelled" and len({span.trace_id for span in spans.values()}) == 1
    )
    assert spans["attempt"].said("outcome") == spans["decode"].said("outcome") == "cancelled"
    assert (
        spans["kv.transfer"].said("outcome") == "aborted"
        and spans["kv.transfer"].parent_id == spans["kv.handoff"].span_id
    )
    _check_root(root, record)
    assert dict(record.stages)["lost"] > 0


async def test_an_exporter_that_is_down_costs_no_request(engines: dict[str, Engine]) -> None:
    def down(component: str) -> Telemetry:
        return traced_telemetry(component, SimpleSpanProcessor(Down()))

    telemetries = {name: down(name) for name in COMPONENTS}
    async with LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=telemetries) as cluster:
        answer = await cluster.complete(PROMPT, max_tokens=4)
        assert len(answer["choices"][0]["token_ids"]) == 4
        async with asyncio.timeout(60):
            while not all(worker.role.is_idle() for worker in cluster.workers.values()):
                await asyncio.sleep(0.005)
