"""Spans of one trace across processes: begun from a ``traceparent``, ended once, and carried on by their own.

Nobody collects by default: then a span costs nothing and hands on its parent's context, so that a trace survives
processes that do not export; so does a span of a trace that is not sampled. A span may be made once it is over, from
the moments that its owner has kept: what is measured is not held up by being told. What an exporter does, or fails to
do, is never seen by who is traced.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core import semconv
from core.errors import Cancelled, InternalError, ServingError

Value = str | int | float | bool | tuple[str, ...]
Kind = Literal["internal", "server", "client", "producer", "consumer"]
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}
_UNSAMPLED = "-00"
_PROPAGATOR = TraceContextTextMapPropagator()
_CANCELLED = Cancelled.slug


class TraceIds(RandomIdGenerator):
    """Random, but for a trace that is to have the id of its request."""

    def __init__(self) -> None:
        self._wanted = 0

    def want(self, trace_id: str) -> None:
        """For the next root span of this thread: 32 hexadecimal digits."""
        self._wanted = int(trace_id, 16)

    def generate_trace_id(self) -> int:
        wanted, self._wanted = self._wanted, 0
        return wanted or super().generate_trace_id()


class Span:
    """Part of a trace under way. As a context manager it ends with the block, and with the slug of what left it."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span | None, traceparent: str) -> None:
        """``traceparent`` is what children and peers continue from."""
        self._span = span
        self.traceparent = traceparent

    @property
    def is_told(self) -> bool:
        """Somebody collects it, and it has not ended."""
        return self._span is not None

    def set(self, **attributes: Value) -> None:
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def link(self, traceparent: str) -> None:
        """Say that another span, perhaps of another process, belongs to this one."""
        context = _span_context(traceparent)
        if self._span is not None and context.is_valid:
            self._span.add_link(context)

    def end(self, outcome: str = "ok", *, ended_at: float | None = None, **attributes: Value) -> None:
        """Only the first call counts. ``outcome`` is of a closed set: ``ok``, a slug, or a reason of the caller's.
        ``ended_at`` is a ``time.monotonic``; None: now."""
        span, self._span = self._span, None
        if span is not None:
            span.set_attributes(_named({**attributes, "outcome": outcome}))
            if outcome != "ok":
                span.set_attribute(semconv.ERROR_TYPE, outcome)
                span.set_status(trace.StatusCode.ERROR if outcome != _CANCELLED else trace.StatusCode.UNSET)
            span.end(None if ended_at is None else wall_ns(ended_at))

    def fail(self, error: BaseException) -> None:
        """End with what ended it: a slug, or ``cancelled`` for a task that was."""
        if isinstance(error, ServingError):
            self.end(error.slug)
        else:
            self.end(InternalError.slug if isinstance(error, Exception) else _CANCELLED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.fail(error)


NO_SPAN = Span(None, "")


def begin_span(
    tracer: trace.Tracer,
    name: str,
    *,
    parent: str,
    kind: Kind = "internal",
    attributes: Mapping[str, Value] | None = None,
    started_at: float | None = None,
) -> Span:
    """A span below ``parent`` (a traceparent; empty or unreadable: a new trace). ``started_at`` is a
    ``time.monotonic``; None: now."""
    if parent.endswith(_UNSAMPLED):
        return Span(None, parent)
    context = _PROPAGATOR.extract({"traceparent": parent}) if parent else trace.set_span_in_context(trace.INVALID_SPAN)
    start = None if started_at is None else wall_ns(started_at)
    span = tracer.start_span(
        name, context=context, kind=_KINDS[kind], attributes=_named(attributes or {}), start_time=start
    )
    own = span.get_span_context()
    if not own.is_valid:
        return Span(span, parent)
    traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags & trace.TraceFlags.SAMPLED:02x}"
    return Span(span if span.is_recording() else None, traceparent)


def wall_ns(monotonic_s: float) -> int:
    """The moment of a ``time.monotonic``, for a collector, which compares processes."""
    return time.time_ns() - int(1e9 * (time.monotonic() - monotonic_s))


def _span_context(traceparent: str) -> trace.SpanContext:
    context = _PROPAGATOR.extract({"traceparent": traceparent})
    return trace.get_current_span(context).get_span_context()


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {
        name if name.startswith(semconv.NAMESPACES) else f"baton.{name}": value for name, value in attributes.items()
    }
