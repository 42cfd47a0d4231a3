"""gRPC clients in core types. One channel for each peer incarnation's address, shared by all calls to it.

Every failure is a typed error of core.errors: a call that only the transport failed is WorkerLost with the peer's id.
Every call has a deadline; long-lived streams are watched by pings.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

from google.protobuf.descriptor import FileDescriptor

from core import types as t
from core.credentials import Credentials
from core.errors import InternalError, StaleIncarnation
from core.handoff import PairCheck, ToHolder, ToReader
from core.ids import GatewayId, Incarnation
from core.security_config import Identity
from rpc.channel import Channel, methods_of
from rpc.convert import TO_HOLDER, TO_READER, WORKER_MESSAGE, from_pb, to_pb
from rpc.pb import decode_pb2, handoff_pb2, prefill_pb2, router_pb2
from rpc.tls import PeerTls

ABORT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0


class _Client:
    """A channel and the methods of a service behind it."""

    def __init__(
        self, address: str, worker_id: str, file: FileDescriptor, service: str, credentials: Credentials | None
    ) -> None:
        self.address = address
        self._worker_id = worker_id
        peer = Identity.ROUTER if service == "Router" else Identity.WORKER
        tls = None if credentials is None else PeerTls(credentials=credentials, peer=peer)
        self._channel = Channel(address, worker_id=worker_id, tls=tls)
        self._methods = methods_of(file, service)

    async def _call(self, name: str, request: Any, *, timeout_s: float) -> Any:
        return await self._channel.call(self._methods[name], request, timeout_s=timeout_s)

    def _stream(self, name: str, request: Any, *, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        return self._channel.stream(self._methods[name], request, timeout_s=timeout_s)

    def _exchange(
        self, name: str, messages: AsyncIterator[Any], encode: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        """The peer's messages while ours go out."""
        return self._channel.stream(self._methods[name], outgoing=(encode(message) async for message in messages))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class RouterClient(_Client):
    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        super().__init__(address, "router", router_pb2.DESCRIPTOR, "Router", credentials)

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        call = self._call("Place", to_pb(request), timeout_s=request.deadline_s)
        return from_pb(t.Placement, await call)

    async def end_placement(self, end: t.PlacementEnd) -> None:
        await self._call("EndPlacement", to_pb(end), timeout_s=CONTROL_TIMEOUT_S)

    async def join(
        self, messages: AsyncIterator[t.WorkerRegistration | t.WorkerLoad]
    ) -> AsyncIterator[t.WorkerCommand]:
        """The membership stream: send registration and loads, receive commands. Ends with a typed error."""
        async with aclosing(self._exchange("Join", messages, WORKER_MESSAGE.encode)) as commands:
            async for command in commands:
                yield from_pb(t.WorkerCommand, command)

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        call = self._call("ReportGateway", to_pb(report), timeout_s=CONTROL_TIMEOUT_S)
        return from_pb(t.ClusterView, await call)

    async def status(self) -> t.ClusterStatus:
        call = self._call("Status", router_pb2.Empty(), timeout_s=CONTROL_TIMEOUT_S)
        return from_pb(t.ClusterStatus, await call)

    async def drain(self, worker_id: str, reason: str) -> None:
        request = router_pb2.DrainRequest(worker_id=worker_id, reason=reason)
        await self._call("Drain", request, timeout_s=CONTROL_TIMEOUT_S)

    async def flip(self, worker_id: str, reason: str) -> tuple[t.PoolSize, ...]:
        request = router_pb2.DrainRequest(worker_id=worker_id, reason=reason)
        return _sizes(await self._call("Flip", request, timeout_s=CONTROL_TIMEOUT_S))

    async def scale(self, pools: tuple[t.PoolSize, ...]) -> tuple[t.PoolSize, ...]:
        request = router_pb2.ScaleRequest(pools=[to_pb(pool) for pool in pools])
        return _sizes(await self._call("Scale", request, timeout_s=CONTROL_TIMEOUT_S))

    async def report_pools(self, report: t.LauncherReport) -> tuple[t.PoolSize, ...]:
        return _sizes(await self._call("ReportPools", to_pb(report), timeout_s=CONTROL_TIMEOUT_S))

    async def watch_pools(self) -> AsyncGenerator[tuple[t.PoolSize, ...], None]:
        async with aclosing(self._stream("WatchPools", router_pb2.Empty())) as messages:
            async for message in messages:
                yield _sizes(message)

    async def start_rollout(self, rollout: t.Rollout) -> None:
        await self._call("StartRollout", to_pb(rollout), timeout_s=CONTROL_TIMEOUT_S)

    async def find_records(self, request_id: str = "", limit: int = 100) -> t.RequestRecords:
        request = router_pb2.RecordQuery(request_id=request_id, limit=limit)
        return from_pb(t.RequestRecords, await self._call("FindRecords", request, timeout_s=CONTROL_TIMEOUT_S))

    async def watch(self, interval_s: float) -> AsyncGenerator[t.ClusterNews, None]:
        """The cluster now and after each change, at least every ``interval_s``. Ends with a typed error."""
        request = router_pb2.WatchRequest(interval_s=interval_s)
        async with aclosing(self._stream("Watch", request)) as messages:
            async for message in messages:
                yield from_pb(t.ClusterNews, message)


def _sizes(reply: Any) -> tuple[t.PoolSize, ...]:
    return tuple(from_pb(t.PoolSize, pool) for pool in reply.pools)


class PrefillClient(_Client):
    """Calls to one incarnation of a prefill worker."""

    def __init__(self, worker: t.WorkerAddress, credentials: Credentials | None = None) -> None:
        super().__init__(worker.address, worker.worker_id, prefill_pb2.DESCRIPTOR, "Prefill", credentials)

    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply:
        """Cancelling this coroutine cancels the call, which aborts the attempt at P."""
        scores: list[Any] = []
        last = None
        stream = self._stream("Prefill", to_pb(request), timeout_s=request.request.deadline_s)
        async with aclosing(stream) as parts:
            async for last in parts:
                scores += last.prompt_logprobs
        if last is None:
            raise InternalError(f"{self._worker_id} ended the prefill without an answer", worker_id=self._worker_id)
        reply = from_pb(t.PrefillReply, last)
        return replace(reply, prompt_logprobs=tuple(from_pb(t.TokenLogprobs, one) for one in scores))

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        call = self._call("AbortPrefill", to_pb(request), timeout_s=ABORT_TIMEOUT_S)
        return from_pb(t.AbortReply, await call)


class DecodeClient(_Client):
    """Calls to one incarnation of a decode worker."""

    def __init__(self, worker: t.WorkerAddress, credentials: Credentials | None = None) -> None:
        super().__init__(worker.address, worker.worker_id, decode_pb2.DESCRIPTOR, "Decode", credentials)
        self._worker = worker

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        timeout_s = min(request.request.deadline_s, CONTROL_TIMEOUT_S)
        return from_pb(t.AdmitReply, await self._call("Admit", to_pb(request), timeout_s=timeout_s))

    async def abort(self, request: t.AbortRequest) -> t.AbortReply:
        call = self._call("AbortDecode", to_pb(request), timeout_s=ABORT_TIMEOUT_S)
        return from_pb(t.AbortReply, await call)

    async def check_pair(self, prefill: t.WorkerAddress) -> PairCheck:
        """Handshake, canary and measurement of every link between the two workers."""
        request = decode_pb2.PairCheckRequest(worker_incarnation=self._worker.incarnation, prefill=to_pb(prefill))
        return from_pb(PairCheck, await self._call("CheckPair", request, timeout_s=CHECK_TIMEOUT_S))

    async def outputs(self, gateway_id: GatewayId, gateway_incarnation: Incarnation) -> AsyncIterator[t.StepOutputs]:
        """The one multiplexed stream of this gateway. Its first message is empty: the stream is registered now,
        requests may be admitted. It ends by a typed error only (WorkerLost, StaleIncarnation, WorkerDraining)."""
        request = self._outputs_request(gateway_id, gateway_incarnation)
        async with aclosing(self._stream("Outputs", request)) as messages:
            async for message in messages:
                yield from_pb(t.StepOutputs, message)
        raise self._outputs_end()

    async def follow_outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, take: Callable[[t.StepOutputs], None]
    ) -> None:
        """The same stream, each message handed to ``take`` where it arrives."""
        request = self._outputs_request(gateway_id, gateway_incarnation)
        await self._channel.follow(
            self._methods["Outputs"], request, lambda message: take(from_pb(t.StepOutputs, message))
        )
        raise self._outputs_end()

    def _outputs_request(self, gateway_id: GatewayId, gateway_incarnation: Incarnation) -> Any:
        return decode_pb2.OutputsRequest(
            gateway_id=gateway_id,
            gateway_incarnation=gateway_incarnation,
            worker_incarnation=self._worker.incarnation,
        )

    def _outputs_end(self) -> StaleIncarnation:
        return StaleIncarnation(f"{self._worker.worker_id} ended the outputs stream", worker_id=self._worker.worker_id)


class HandoffClient(_Client):
    """D's side of the control stream to one incarnation of a prefill worker."""

    def __init__(self, worker: t.WorkerAddress, credentials: Credentials | None = None) -> None:
        super().__init__(worker.address, worker.worker_id, handoff_pb2.DESCRIPTOR, "Handoff", credentials)

    async def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]:
        async with aclosing(self._exchange("Connect", messages, TO_HOLDER.encode)) as replies:
            async for reply in replies:
                decoded = TO_READER.decode(reply)
                if decoded is not None:
                    yield decoded
