"""A collector: takes spans over OTLP and gRPC, as any other would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from core.config import TelemetryConfig
from core.telemetry import Telemetry, exporter, traced_telemetry


@dataclass(frozen=True)
class Told:
    """A span as it arrived."""

    name: str
    component: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, object]
    links: tuple[str, ...]
    """Ids of spans."""

    def said(self, name: str) -> object:
        return self.attributes[f"baton.{name}"]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[ResourceSpans] = []
        self.address = ""
        self._processors: list[BatchSpanProcessor] = []

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        self.received += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def telemetries(self, *components: str) -> dict[str, Telemetry]:
        """Of components whose spans come here, over the wire."""
        made = {}
        for component in components:
            self._processors.append(BatchSpanProcessor(exporter(TelemetryConfig(otlp_endpoint=self.address))))
            made[component] = traced_telemetry(component, self._processors[-1])
        return made

    async def spans(self) -> list[Told]:
        """Those that have ended by now."""
        for processor in self._processors:
            await asyncio.to_thread(processor.force_flush)
        return [told(span) for each in self.received for scope in each.scope_spans for span in scope.spans]

    async def until(self, *names: str) -> list[Told]:
        """All spans, once there is one of each name: some end after the answer."""
        async with asyncio.timeout(60):
            while not set(names) <= {span.name for span in await self.spans()}:
                await asyncio.sleep(0.01)
        return await self.spans()

    async def shut_down(self) -> None:
        for processor in self._processors:
            await asyncio.to_thread(processor.shutdown)


@asynccontextmanager
async def open_collector() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await collector.shut_down()
        await server.stop(0)


def told(span: Span) -> Told:
    values = {each.key: _value(each.value) for each in span.attributes}
    return Told(
        name=span.name,
        component=str(values.get("baton.component", "")),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=values,
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
