"""Errors over gRPC: a typed error crosses in trailing metadata and is the same class on the other side.

One of the three places that may catch ``Exception`` (design.md 6) is :class:`ErrorInterceptor`.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ServingError,
    WorkerLost,
    error_from_slug,
)

log = logging.getLogger(__name__)

METADATA_KEY = "baton-error-bin"
"""Trailing metadata: JSON bytes with slug, message, param, code, worker_id, retry_after_s."""
_STATUS_OF = {status.value[0]: status for status in grpc.StatusCode}
OK, CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 0, 1, 2, 4, 8, 13, 14
"""Statuses as they cross the wire."""


def to_metadata(error: ServingError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries ``error``. Messages are cut so that metadata stays below HTTP/2 limits."""
    content = {
        "slug": error.slug,
        "message": error.message[:2000],
        "param": error.param,
        "code": error.code,
        "worker_id": error.worker_id,
        "retry_after_s": error.retry_after_s,
    }
    return ((METADATA_KEY, json.dumps(content).encode()),)


def from_status(code: int, message: str, encoded: bytes | None, *, worker_id: str) -> ServingError:
    """The typed error behind a call that ended with ``code`` (never OK). ``encoded`` is what the trailing metadata has
    under `METADATA_KEY`; without it only the transport is heard, and ``worker_id`` is the peer's."""
    if encoded is not None:
        content = json.loads(base64.b64decode(encoded + b"==="))
        return error_from_slug(
            content["slug"],
            content["message"],
            param=content["param"],
            code=content["code"],
            worker_id=content["worker_id"] or worker_id,
            retry_after_s=content.get("retry_after_s"),
        )
    status = _STATUS_OF.get(code, grpc.StatusCode.UNKNOWN)
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{worker_id} did not answer in time", worker_id=worker_id)
    reason = f"{status.name.lower()}: {message}" if message else status.name.lower()
    if status in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
        return WorkerLost(f"{worker_id} is not reachable ({reason})", worker_id=worker_id)
    return InternalError(f"{worker_id} failed the call ({reason})", worker_id=worker_id)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status with the slug; unknown exceptions become InternalError, logged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            wrapped = _guard_stream(_behavior(handler), method)
        else:
            wrapped = _guard_unary(_behavior(handler), method)
        factory = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return factory(wrapped, handler.request_deserializer, handler.response_serializer)


def _behavior(handler: Any) -> Any:
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def _guard_unary(behavior: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(error, method, context)

    return guarded


def _guard_stream(behavior: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        responses = behavior(request, context)
        try:
            async for response in responses:
                yield response
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(error, method, context)
        finally:
            await responses.aclose()

    return guarded


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if not isinstance(error, ServingError):
        log.error("handler failed", extra={"method": method}, exc_info=error)
        error = InternalError("internal error")
    if isinstance(error, Cancelled):
        log.debug("call cancelled", extra={"method": method})
    status = grpc.StatusCode[error.grpc_status]
    await context.abort(status, error.message[:200], to_metadata(error))  # for eyes; the metadata has it all
