"""What the gateway needs of the rest of the cluster. `rpc` provides it; tests script it."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from core import types as t
from core.credentials import Credentials
from core.ids import GatewayId, Incarnation
from rpc.clients import DecodeClient, PrefillClient


class RouterPort(Protocol):
    async def place(self, request: t.PlaceRequest) -> t.Placement: ...
    async def end_placement(self, end: t.PlacementEnd) -> None: ...
    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView: ...
    async def close(self) -> None: ...


class NewsPort(Protocol):
    """What the console needs of the router."""

    async def find_records(self, request_id: str = "", limit: int = 100) -> t.RequestRecords: ...
    def watch(self, interval_s: float) -> AsyncGenerator[t.ClusterNews, None]: ...


class WholeRouterPort(RouterPort, NewsPort, Protocol):
    pass


class PrefillPort(Protocol):
    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply: ...
    async def abort(self, request: t.AbortRequest) -> t.AbortReply: ...
    async def close(self) -> None: ...


class DecodePort(Protocol):
    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply: ...
    async def abort(self, request: t.AbortRequest) -> t.AbortReply: ...
    async def follow_outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, take: Callable[[t.StepOutputs], None]
    ) -> None:
        """Hands over each message where it arrives, the first one (empty) when the stream is registered. Ends by a
        typed error only."""

    async def close(self) -> None: ...


class ClientFactory(Protocol):
    """Makes clients to worker incarnations. Making one does no I/O."""

    def prefill(self, worker: t.WorkerAddress) -> PrefillPort: ...
    def decode(self, worker: t.WorkerAddress) -> DecodePort: ...


class RpcClients:
    """The real factory."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials

    def prefill(self, worker: t.WorkerAddress) -> PrefillPort:
        return PrefillClient(worker, self._credentials)

    def decode(self, worker: t.WorkerAddress) -> DecodePort:
        return DecodeClient(worker, self._credentials)
