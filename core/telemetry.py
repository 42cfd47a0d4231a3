"""Logging, metrics and tracing set-up of one process. Metric names live with their owners, the registry here."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from core.config import TelemetryConfig
from core.errors import ConfigError
from core.spans import Kind, Span, TraceIds, Value, begin_span

METRIC_PREFIX = "baton"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, component, logger, event, and the fields given as ``extra``."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(component: str, level: str = "info") -> None:
    """Send every log line of this process to stderr as JSON. Call once, at the process entry."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a component needs to be seen: its metric registry and its tracer. One for each component, never global."""

    component: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    tracer: trace.Tracer | None = None
    """None: nobody collects spans."""
    ids: TraceIds = field(default_factory=TraceIds)
    """Of the tracer."""

    def begin(
        self,
        name: str,
        *,
        parent: str = "",
        trace_id: str = "",
        kind: Kind = "internal",
        **attributes: Value,
    ) -> Span:
        """A span of this component below ``parent``, a traceparent. Without one a trace begins; ``trace_id`` (32
        hexadecimal digits) is its id, if given."""
        if self.tracer is None:
            return Span(None, parent)
        if trace_id and not parent:
            self.ids.want(trace_id)
        attributes["component"] = self.component
        return begin_span(self.tracer, name, parent=parent, kind=kind, attributes=attributes)

    def render_metrics(self) -> bytes:
        """The registry in Prometheus text format."""
        return generate_latest(self.registry)


def setup_telemetry(component: str, config: TelemetryConfig) -> Telemetry:
    """Logging, an own registry, and a tracer that exports over OTLP if an endpoint is configured."""
    setup_logging(component, config.log_level)
    if config.otlp_endpoint is None:
        return Telemetry(component=component)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "telemetry.otlp_endpoint is set, but the exporter is not installed: pip install 'baton-serve[otlp]'"
        ) from None
    return traced_telemetry(component, BatchSpanProcessor(OTLPSpanExporter(endpoint=config.otlp_endpoint)))


def traced_telemetry(component: str, processor: SpanProcessor) -> Telemetry:
    """A component whose spans go to ``processor``."""
    ids = TraceIds()
    provider = TracerProvider(resource=Resource.create({"service.name": f"baton-{component}"}), id_generator=ids)
    provider.add_span_processor(processor)
    return Telemetry(component=component, tracer=provider.get_tracer("baton"), ids=ids)
