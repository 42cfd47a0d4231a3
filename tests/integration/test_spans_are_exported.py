"""What a process says of its work reaches a collector over OTLP, also what it said just before its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from core.config import TelemetryConfig, load_config
from core.errors import ConfigError

LIMIT_S = 60.0
PROCESS = """
import sys
from core.config import TelemetryConfig
from core.telemetry import setup_telemetry

telemetry = setup_telemetry("decode-0", TelemetryConfig(otlp_endpoint=sys.argv[1]))
with telemetry.begin("decode", attempt=2) as above:
    with telemetry.begin("kv.handoff", parent=above.traceparent, peer="prefill-0"):
        pass
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[ResourceSpans] = []
        self.address = ""

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        self.received += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield collector
    await server.stop(0)


async def _run(endpoint: str) -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, endpoint)
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


async def test_a_process_exports_its_spans_before_it_ends(collector: Collector) -> None:
    assert await _run(collector.address) == 0
    (of_process,) = collector.received
    resource = {each.key: each.value.string_value for each in of_process.resource.attributes}
    spans = {span.name: span for scope in of_process.scope_spans for span in scope.spans}
    below, above = spans["kv.handoff"], spans["decode"]
    assert resource["service.name"] == "baton-decode-0"
    assert (below.trace_id, below.parent_span_id) == (above.trace_id, above.span_id)
    assert {each.key for each in below.attributes} >= {"baton.peer", "baton.component"}
    assert above.start_time_unix_nano <= below.start_time_unix_nano <= below.end_time_unix_nano


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "collector", "ftp://127.0.0.1:4317", "http://"])
def test_an_endpoint_of_which_nobody_knows_whether_it_has_tls_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"http://HOST:4317"):
        load_config(overrides=[f"telemetry.otlp_endpoint={endpoint}"], environ={})
    assert TelemetryConfig(otlp_endpoint="https://collector:4317").otlp_endpoint
