"""The router over the virtual network: what ``rpc.clients.RouterClient`` is in the product. Messages are encoded and
decoded as on a real wire, so that what that costs both sides is counted."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from bench.virtual.loop import Process
from bench.virtual.network import Network
from core import types as t
from rpc.convert import WORKER_MESSAGE, from_pb, message_class, to_pb
from rpc.pb import router_pb2

T = TypeVar("T")


def _coded(value: Any) -> bytes:
    return to_pb(value).SerializeToString()  # type: ignore[no-any-return]


def _decoded(cls: type[T], data: bytes) -> T:
    return from_pb(cls, message_class(cls).FromString(data))


class CodedRouter:
    """The router's handler behind its codec."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    async def place(self, data: bytes) -> bytes:
        return _coded(await self._handler.place(_decoded(t.PlaceRequest, data)))

    async def end_placement(self, data: bytes) -> None:
        await self._handler.end_placement(_decoded(t.PlacementEnd, data))

    async def report_gateway(self, data: bytes) -> bytes:
        return _coded(await self._handler.report_gateway(_decoded(t.GatewayReport, data)))

    async def join(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        kind = router_pb2.WorkerMessage
        loads = (WORKER_MESSAGE.decode(kind.FromString(data)) async for data in messages)
        registration = await anext(loads)
        async for command in self._handler.join(registration, loads):
            yield _coded(command)


class RouterWire:
    def __init__(self, network: Network, process: Process, to: t.WorkerAddress) -> None:
        self._network, self._process, self._to = network, process, to

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        return _decoded(t.Placement, await self._call("place", request, timeout_s=request.deadline_s))

    async def end_placement(self, end: t.PlacementEnd) -> None:
        await self._call("end_placement", end)

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        return _decoded(t.ClusterView, await self._call("report_gateway", report))

    async def join(self, messages: AsyncIterator[Any]) -> AsyncIterator[t.WorkerCommand]:
        coded = (WORKER_MESSAGE.encode(message).SerializeToString() async for message in messages)
        stream = self._network.stream(
            self._process, self._to, lambda router, inner: router.role.join(inner), coded, "join"
        )
        async for command in stream:
            yield _decoded(t.WorkerCommand, command)

    async def _call(self, method: str, request: Any, *, timeout_s: float = 5.0) -> Any:
        return await self._network.call(self._process, self._to, method, _coded(request), timeout_s=timeout_s)

    async def close(self) -> None:
        pass
