"""gRPC clients in core types. One channel for each peer incarnation's address, shared by all calls to it.

Every failure is a typed error of core.errors: a call that only the transport failed is WorkerLost with the peer's id.
Every call has a deadline; long-lived streams are watched by keepalive.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

import grpc
import grpc.aio

from core import types as t
from core.errors import InternalError, StaleIncarnation, WorkerLost
from core.handoff import PairCheck, ToHolder, ToReader
from core.ids import GatewayId, Incarnation
from rpc.convert import TO_HOLDER, TO_READER, WORKER_MESSAGE, from_pb, to_pb
from rpc.errors import from_rpc_error
from rpc.pb import (
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer at the same address gets a fresh connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # in truth the time that a connection may take to come about
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # recovery is decided in gateway/pipeline.py and nowhere else
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # what really ends a hung peer's streams; 60 s by default
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)
ABORT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0


class _Client:
    """A channel and the translation of its failures."""

    def __init__(self, address: str, *, worker_id: str | None = None) -> None:
        self.address = address
        self._worker_id = worker_id
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def _call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, worker_id=self._worker_id) from None
        except grpc.aio.UsageError:
            raise self._closed() from None
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls. Unless somebody cancelled the caller too, it is to hear of it.
            if _is_cancelled():
                raise
            raise self._closed() from None

    async def _stream(
        self, method: Any, request: Any, outgoing: "_Outgoing | None" = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a response stream; leaving it early cancels the call."""
        call = None
        try:
            call = method(request, timeout=timeout_s)
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, worker_id=self._worker_id) from None
        except grpc.aio.UsageError:
            raise self._closed() from None
        except asyncio.CancelledError:
            # grpc cancels the call, and with it whoever reads it, when the request iterator raises. That is no
            # cancellation of our task, and swallowing it would end a long-lived stream without a word.
            if outgoing is not None and outgoing.error is not None:
                raise InternalError("the request stream failed") from outgoing.error
            if _is_cancelled():
                raise
            raise self._closed() from None
        finally:
            if call is not None:
                call.cancel()
            if outgoing is not None:
                outgoing.end()

    def _closed(self) -> WorkerLost:
        return WorkerLost(f"the connection to {self._worker_id or 'peer'} was closed here", worker_id=self._worker_id)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _is_cancelled() -> bool:
    """Whether the running task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Outgoing:
    """The encoded request messages of a stream, and what their source raised, if it did."""

    def __init__(self, messages: AsyncIterator[Any], encode: Callable[[Any], Any]) -> None:
        self._messages = messages
        self._encode = encode
        self._reader: asyncio.Task[Any] | None = None
        self.error: BaseException | None = None

    def end(self) -> None:
        """The call is over. Of one that broke, grpc leaves the task that reads us waiting for our next message."""
        if self._reader is not None:
            self._reader.cancel()

    async def stream(self) -> AsyncIterator[Any]:
        self._reader = asyncio.current_task()
        try:
            async for message in self._messages:
                yield self._encode(message)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self.error = error
            raise


class RouterClient(_Client):
    def __init__(self, address: str) -> None:
        super().__init__(address, worker_id="router")
        self._stub: Any = router_pb2_grpc.RouterStub(self._channel)

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        call = self._call(self._stub.Place, to_pb(request), timeout_s=request.deadline_s)
        return from_pb(t.Placement, await call)

    async def end_placement(self, end: t.PlacementEnd) -> None:
        await self._call(self._stub.EndPlacement, to_pb(end), timeout_s=CONTROL_TIMEOUT_S)

    async def join(
        self, messages: AsyncIterator[t.WorkerRegistration | t.WorkerLoad]
    ) -> AsyncIterator[t.WorkerCommand]:
        """The membership stream: send registration and loads, receive commands. Ends with a typed error."""
        outgoing = _Outgoing(messages, WORKER_MESSAGE.encode)
        async with aclosing(self._stream(self._stub.Join, outgoing.stream(), outgoing)) as commands:
            async for command in commands:
                yield from_pb(t.WorkerCommand, command)

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        call = self._call(self._stub.ReportGateway, to_pb(report), timeout_s=CONTROL_TIMEOUT_S)
        return from_pb(t.ClusterView, await call)

    async def status(self) -> t.ClusterStatus:
        call = self._call(self._stub.Status, router_pb2.Empty(), timeout_s=CONTROL_TIMEOUT_S)
        return from_pb(t.ClusterStatus, await call)

    async def drain(self, worker_id: str, reason: str) -> None:
        request = router_pb2.DrainRequest(worker_id=worker_id, reason=reason)
        await self._call(self._stub.Drain, request, timeout_s=CONTROL_TIMEOUT_S)

    async def flip(self, worker_id: str, reason: str) -> tuple[t.PoolSize, ...]:
        request = router_pb2.DrainRequest(worker_id=worker_id, reason=reason)
        return _sizes(await self._call(self._stub.Flip, request, timeout_s=CONTROL_TIMEOUT_S))

    async def scale(self, pools: tuple[t.PoolSize, ...]) -> tuple[t.PoolSize, ...]:
        request = router_pb2.ScaleRequest(pools=[to_pb(pool) for pool in pools])
        return _sizes(await self._call(self._stub.Scale, request, timeout_s=CONTROL_TIMEOUT_S))

    async def report_pools(self, report: t.LauncherReport) -> tuple[t.PoolSize, ...]:
        return _sizes(await self._call(self._stub.ReportPools, to_pb(report), timeout_s=CONTROL_TIMEOUT_S))

    async def watch_pools(self) -> AsyncGenerator[tuple[t.PoolSize, ...], None]:
        async with aclosing(self._stream(self._stub.WatchPools, router_pb2.Empty())) as messages:
            async for message in messages:
                yield _sizes(message)

    async def find_records(self, request_id: str = "", limit: int = 100) -> t.RequestRecords:
        request = router_pb2.RecordQuery(request_id=request_id, limit=limit)
        return from_pb(t.RequestRecords, await self._call(self._stub.FindRecords, request, timeout_s=CONTROL_TIMEOUT_S))


def _sizes(reply: Any) -> tuple[t.PoolSize, ...]:
    return tuple(from_pb(t.PoolSize, pool) for pool in reply.pools)


class PrefillClient(_Client):
    """Calls to one incarnation of a prefill worker."""

    def __init__(self, worker: t.WorkerAddress) -> None:
        super().__init__(worker.address, worker_id=worker.worker_id)
        self._stub: Any = prefill_pb2_grpc.PrefillStub(self._channel)

    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply:
        """Cancelling this coroutine cancels the call, which aborts the attempt at P."""
        scores: list[Any] = []
        last = None
        stream = self._stream(self._stub.Prefill, to_pb(request), timeout_s=request.request.deadline_s)
        async with aclosing(stream) as parts:
            async for last in parts:
                scores += last.prompt_logprobs
        if last is None:
            raise InternalError(f"{self._worker_id} ended the prefill without an answer", worker_id=self._worker_id)
        reply = from_pb(t.PrefillReply, last)
        return replace(reply, prompt_logprobs=tuple(from_pb(t.TokenLogprobs, one) for one in scores))

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        call = self._call(self._stub.AbortPrefill, to_pb(request), timeout_s=ABORT_TIMEOUT_S)
        return from_pb(t.AbortReply, await call)


class DecodeClient(_Client):
    """Calls to one incarnation of a decode worker."""

    def __init__(self, worker: t.WorkerAddress) -> None:
        super().__init__(worker.address, worker_id=worker.worker_id)
        self._worker = worker
        self._stub: Any = decode_pb2_grpc.DecodeStub(self._channel)

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        timeout_s = min(request.request.deadline_s, CONTROL_TIMEOUT_S)
        return from_pb(t.AdmitReply, await self._call(self._stub.Admit, to_pb(request), timeout_s=timeout_s))

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        call = self._call(self._stub.AbortDecode, to_pb(request), timeout_s=ABORT_TIMEOUT_S)
        return from_pb(t.AbortReply, await call)

    async def check_pair(self, prefill: t.WorkerAddress) -> PairCheck:
        """Handshake, canary and measurement of every link between the two workers."""
        request = decode_pb2.PairCheckRequest(worker_incarnation=self._worker.incarnation, prefill=to_pb(prefill))
        return from_pb(PairCheck, await self._call(self._stub.CheckPair, request, timeout_s=CHECK_TIMEOUT_S))

    async def outputs(self, gateway_id: GatewayId, gateway_incarnation: Incarnation) -> AsyncIterator[t.StepOutputs]:
        """The one multiplexed stream of this gateway. Its first message is empty: the stream is registered now,
        requests may be admitted. It ends by a typed error only (WorkerLost, StaleIncarnation, WorkerDraining)."""
        request = decode_pb2.OutputsRequest(
            gateway_id=gateway_id,
            gateway_incarnation=gateway_incarnation,
            worker_incarnation=self._worker.incarnation,
        )
        async with aclosing(self._stream(self._stub.Outputs, request)) as messages:
            async for message in messages:
                yield from_pb(t.StepOutputs, message)
        raise StaleIncarnation(f"{self._worker.worker_id} ended the outputs stream", worker_id=self._worker.worker_id)


class HandoffClient(_Client):
    """D's side of the control stream to one incarnation of a prefill worker."""

    def __init__(self, worker: t.WorkerAddress) -> None:
        super().__init__(worker.address, worker_id=worker.worker_id)
        self._stub: Any = handoff_pb2_grpc.HandoffStub(self._channel)

    async def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]:
        outgoing = _Outgoing(messages, TO_HOLDER.encode)
        async with aclosing(self._stream(self._stub.Connect, outgoing.stream(), outgoing)) as replies:
            async for reply in replies:
                decoded = TO_READER.decode(reply)
                if decoded is not None:
                    yield decoded
