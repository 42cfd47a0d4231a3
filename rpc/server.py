"""gRPC servers: one process, one server, any of the four services. Handlers are written in core types.

A process implements the handler protocols below and hands itself to :class:`RpcServer`; protobuf stays in this package.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from core import types as t
from core.config import split_address
from core.credentials import Credentials
from core.errors import ConfigError, InvalidRequest
from core.handoff import PairCheck, ToHolder, ToReader
from core.ids import GatewayId, Incarnation
from rpc.convert import TO_HOLDER, TO_READER, WORKER_MESSAGE, from_pb, to_pb
from rpc.errors import ErrorInterceptor
from rpc.identities import IdentityInterceptor, server_credentials
from rpc.parts import split_outputs, split_scores
from rpc.pb import (
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

log = logging.getLogger(__name__)

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a silent split of the traffic
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # keepalive pings of idle streams are welcome
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 5000),  # a peer that vanished without a FIN is noticed, its calls are cancelled
    ("grpc.keepalive_timeout_ms", 10_000),  # our clients answer on their event loop, which may be held up
    ("grpc.http2.ping_timeout_ms", 10_000),  # what really ends a hung peer's calls; 60 s by default
    ("grpc.keepalive_permit_without_calls", 1),
)


class RouterHandler(Protocol):
    """See proto/router.proto for the contract of each call."""

    async def place(self, request: t.PlaceRequest) -> t.Placement: ...
    async def end_placement(self, end: t.PlacementEnd) -> None: ...
    def join(
        self, registration: t.WorkerRegistration, messages: AsyncIterator[t.WorkerRegistration | t.WorkerLoad]
    ) -> AsyncGenerator[t.WorkerCommand, None]:
        """The iterator's end (or its cancellation) is the end of the worker's stream."""

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView: ...
    async def status(self) -> t.ClusterStatus: ...
    async def drain(self, worker_id: str, reason: str) -> None: ...
    async def flip(self, worker_id: str, reason: str) -> tuple[t.PoolSize, ...]: ...
    async def scale(self, pools: tuple[t.PoolSize, ...]) -> tuple[t.PoolSize, ...]: ...
    def watch_pools(self) -> AsyncGenerator[tuple[t.PoolSize, ...], None]: ...
    async def report_pools(self, report: t.LauncherReport) -> tuple[t.PoolSize, ...]: ...
    async def start_rollout(self, rollout: t.Rollout) -> None: ...
    async def find_records(self, request_id: str, limit: int) -> t.RequestRecords: ...
    def watch(self, interval_s: float) -> AsyncGenerator[t.ClusterNews, None]: ...


class PrefillHandler(Protocol):
    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply:
        """Cancellation of the call is cancellation of this coroutine, and must abort the attempt."""

    async def abort_prefill(self, request: t.AbortRequest) -> t.AbortReply: ...


class DecodeHandler(Protocol):
    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply: ...
    async def abort_decode(self, request: t.AbortRequest) -> t.AbortReply: ...
    def outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, worker_incarnation: Incarnation
    ) -> AsyncGenerator[t.StepOutputs, None]:
        """The end of the iteration is the loss of the gateway: its requests are aborted."""

    async def check_pair(self, prefill: t.WorkerAddress, worker_incarnation: Incarnation) -> PairCheck: ...


class HandoffHandler(Protocol):
    def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]:
        """One reader's control stream. Its end is the loss of the reader's connection."""


class RpcServer:
    """A gRPC server with health and graceful stop. Add services, then :meth:`start`."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        """With credentials only who proves by a certificate that it may call a method is served."""
        self._credentials = credentials
        interceptors: tuple[grpc.aio.ServerInterceptor, ...] = (ErrorInterceptor(),)
        if credentials is not None:
            interceptors += (IdentityInterceptor(credentials),)
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = ""
        """``host:port`` after the start."""

    def add_router(self, handler: RouterHandler) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(_RouterServicer(handler), self._server)

    def add_prefill(self, handler: PrefillHandler) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(_PrefillServicer(handler), self._server)

    def add_decode(self, handler: DecodeHandler) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(_DecodeServicer(handler), self._server)

    def add_handoff(self, handler: HandoffHandler) -> None:
        handoff_pb2_grpc.add_HandoffServicer_to_server(_HandoffServicer(handler), self._server)

    async def start(self, listen: str) -> str:
        """Bind ``host:port`` (port 0 takes a free one) and serve. Returns the bound address. Raises ConfigError."""
        host, _ = split_address(listen)
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, server_credentials(self._credentials))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(f"cannot listen on {listen}: the port is taken or not ours; free it or choose another")
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.address = f"{host}:{port}"
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


# -- servicers --------------------------------------------------------------------------------------------------------

_Context = Any


class _RouterServicer(router_pb2_grpc.RouterServicer):
    def __init__(self, handler: RouterHandler) -> None:
        self._handler = handler

    async def Place(self, request: router_pb2.PlaceRequest, context: _Context) -> Any:
        return to_pb(await self._handler.place(from_pb(t.PlaceRequest, request)))

    async def EndPlacement(self, request: router_pb2.PlacementEnd, context: _Context) -> router_pb2.Empty:
        await self._handler.end_placement(from_pb(t.PlacementEnd, request))
        return router_pb2.Empty()

    async def Join(self, requests: Any, context: _Context) -> AsyncIterator[Any]:
        messages = _decoded(requests, WORKER_MESSAGE.decode)
        registration = await anext(messages, None)
        if not isinstance(registration, t.WorkerRegistration):
            raise InvalidRequest("the first message of Join must be a registration")
        async with aclosing(self._handler.join(registration, messages)) as commands:
            async for command in commands:
                yield to_pb(command)

    async def ReportGateway(self, request: router_pb2.GatewayReport, context: _Context) -> Any:
        return to_pb(await self._handler.report_gateway(from_pb(t.GatewayReport, request)))

    async def Status(self, request: router_pb2.Empty, context: _Context) -> Any:
        return to_pb(await self._handler.status())

    async def Drain(self, request: router_pb2.DrainRequest, context: _Context) -> router_pb2.Empty:
        await self._handler.drain(request.worker_id, request.reason)
        return router_pb2.Empty()

    async def Flip(self, request: router_pb2.DrainRequest, context: _Context) -> router_pb2.PoolSizes:
        return _sizes(await self._handler.flip(request.worker_id, request.reason))

    async def Scale(self, request: router_pb2.ScaleRequest, context: _Context) -> router_pb2.PoolSizes:
        return _sizes(await self._handler.scale(tuple(from_pb(t.PoolSize, pool) for pool in request.pools)))

    async def ReportPools(self, request: router_pb2.LauncherReport, context: _Context) -> router_pb2.PoolSizes:
        return _sizes(await self._handler.report_pools(from_pb(t.LauncherReport, request)))

    async def WatchPools(self, request: router_pb2.Empty, context: _Context) -> AsyncIterator[router_pb2.PoolSizes]:
        async with aclosing(self._handler.watch_pools()) as sizes:
            async for pools in sizes:
                yield _sizes(pools)

    async def StartRollout(self, request: router_pb2.Rollout, context: _Context) -> router_pb2.Empty:
        await self._handler.start_rollout(from_pb(t.Rollout, request))
        return router_pb2.Empty()

    async def FindRecords(self, request: router_pb2.RecordQuery, context: _Context) -> Any:
        return to_pb(await self._handler.find_records(request.request_id, request.limit))

    async def Watch(self, request: router_pb2.WatchRequest, context: _Context) -> AsyncIterator[Any]:
        async with aclosing(self._handler.watch(request.interval_s)) as news:
            async for one in news:
                yield to_pb(one)


def _sizes(pools: tuple[t.PoolSize, ...]) -> router_pb2.PoolSizes:
    return router_pb2.PoolSizes(pools=[to_pb(pool) for pool in pools])


class _PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, handler: PrefillHandler) -> None:
        self._handler = handler

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: _Context) -> AsyncIterator[Any]:
        reply = await self._handler.prefill(from_pb(t.PrefillRequest, request))
        *before, last = split_scores(reply.prompt_logprobs)
        for part in before:
            yield prefill_pb2.PrefillReply(prompt_logprobs=[to_pb(one) for one in part])
        yield to_pb(replace(reply, prompt_logprobs=last))

    async def AbortPrefill(self, request: Any, context: _Context) -> Any:
        return to_pb(await self._handler.abort_prefill(from_pb(t.AbortRequest, request)))


class _DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, handler: DecodeHandler) -> None:
        self._handler = handler

    async def CheckPair(self, request: decode_pb2.PairCheckRequest, context: _Context) -> Any:
        prefill = from_pb(t.WorkerAddress, request.prefill)
        return to_pb(await self._handler.check_pair(prefill, Incarnation(request.worker_incarnation)))

    async def Admit(self, request: decode_pb2.AdmitRequest, context: _Context) -> Any:
        return to_pb(await self._handler.admit(from_pb(t.AdmitRequest, request)))

    async def AbortDecode(self, request: Any, context: _Context) -> Any:
        return to_pb(await self._handler.abort_decode(from_pb(t.AbortRequest, request)))

    async def Outputs(self, request: decode_pb2.OutputsRequest, context: _Context) -> AsyncIterator[Any]:
        outputs = self._handler.outputs(
            GatewayId(request.gateway_id),
            Incarnation(request.gateway_incarnation),
            Incarnation(request.worker_incarnation),
        )
        async with aclosing(outputs) as step_outputs:
            async for message in step_outputs:
                for part in split_outputs(message):
                    yield to_pb(part)


class _HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    def __init__(self, handler: HandoffHandler) -> None:
        self._handler = handler

    async def Connect(self, requests: Any, context: _Context) -> AsyncIterator[handoff_pb2.ToReader]:
        messages = _decoded(requests, TO_HOLDER.decode)
        async with aclosing(self._handler.connect(messages)) as replies:
            async for reply in replies:
                yield TO_READER.encode(reply)


async def _decoded(requests: Any, decode: Any) -> AsyncIterator[Any]:
    """The decoded requests. Ends when the caller half-closes or is gone; unknown kinds of a newer peer are skipped."""
    try:
        async for request in requests:
            message = decode(request)
            if message is not None:
                yield message
    except asyncio.CancelledError:
        raise
    except grpc.aio.UsageError:
        return  # the call ended while we waited for its next message
