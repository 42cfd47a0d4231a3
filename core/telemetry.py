"""Logging, metrics and tracing set-up of one process. Metric names live with their owners, the registry here."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from core import semconv
from core.config import TelemetryConfig
from core.errors import ConfigError
from core.spans import Kind, Span, TraceIds, Value, begin_span

METRIC_PREFIX = "baton"
HTTP_PATH = "/v1/traces"
"""Of OTLP over HTTP, behind the address of a collector."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
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
    record_prompts: bool = False
    """Spans bear the text of prompts and answers."""

    def begin(
        self,
        name: str,
        *,
        parent: str = "",
        trace_id: str = "",
        kind: Kind = "internal",
        started_at: float | None = None,
        **attributes: Value,
    ) -> Span:
        """A span of this component below ``parent``, a traceparent. Without one a trace begins; ``trace_id`` (32
        hexadecimal digits) is its id, if given. ``started_at`` is a ``time.monotonic``; None: now."""
        if self.tracer is None:
            return Span(None, parent)
        if trace_id and not parent:
            self.ids.want(trace_id)
        attributes["component"] = self.component
        return begin_span(self.tracer, name, parent=parent, kind=kind, attributes=attributes, started_at=started_at)

    def tell(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        *,
        parent: str,
        kind: Kind = "internal",
        outcome: str = "ok",
        link: str = "",
        **attributes: Value,
    ) -> None:
        """A span that is over, by the ``time.monotonic`` of its begin and end. Nothing without a parent."""
        if self.tracer is not None and parent:
            span = self.begin(name, parent=parent, trace_id="", kind=kind, started_at=started_at, **attributes)
            span.link(link)
            span.end(outcome, ended_at=max(started_at, ended_at))

    def render_metrics(self, accept: str = "") -> bytes:
        """The registry in Prometheus' text format, or in that of OpenMetrics (with exemplars) for who accepts it."""
        if not _accepts_openmetrics(accept):
            return generate_latest(self.registry)
        # Names stay as they are: the encoder's default writes vLLM's colon as an underscore.
        text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self.registry, escaping=openmetrics.ALLOWUTF8
        )
        return text


def metrics_type(accept: str) -> str:
    """The content type of what `Telemetry.render_metrics` makes for an Accept header."""
    return _OPENMETRICS if _accepts_openmetrics(accept) else _TEXT


def _accepts_openmetrics(accept: str) -> bool:
    return "application/openmetrics-text" in accept


def setup_telemetry(component: str, config: TelemetryConfig) -> Telemetry:
    """Logging, an own registry, and a tracer that exports over OTLP if an endpoint is configured."""
    setup_logging(component, config.log_level)
    if config.otlp_endpoint is None:
        return Telemetry(component=component)
    processor = BatchSpanProcessor(exporter(config))
    telemetry = traced_telemetry(component, processor, sample_ratio=config.sample_ratio)
    return replace(telemetry, record_prompts=config.record_prompts)


def exporter(config: TelemetryConfig) -> SpanExporter:
    """To the endpoint, which is set. Raises ConfigError where the exporter's package is missing."""
    endpoint = config.otlp_endpoint or ""
    try:
        if config.otlp_protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            return grpc.OTLPSpanExporter(endpoint=endpoint)
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        path = "" if endpoint.rstrip("/").endswith(HTTP_PATH) else HTTP_PATH
        return http.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
    except ImportError:
        raise ConfigError(
            "telemetry.otlp_endpoint is set, but the exporter is not installed: pip install 'baton-serve[otlp]'"
        ) from None


def traced_telemetry(component: str, processor: SpanProcessor, *, sample_ratio: float = 1.0) -> Telemetry:
    """A component whose spans go to ``processor``: those of traces that its caller samples, and ``sample_ratio`` of
    those that begin here."""
    ids = TraceIds()
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"baton-{component}", "gen_ai.conventions.version": semconv.VERSION}),
        id_generator=ids,
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
    )
    provider.add_span_processor(processor)
    return Telemetry(component=component, tracer=provider.get_tracer("baton"), ids=ids)
