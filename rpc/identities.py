"""Who may call what: every method names the processes that have a reason to. With mTLS nobody else is served."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from core.credentials import Credentials
from core.errors import NotAllowed
from core.security_config import Identity

_GATEWAY, _WORKER = frozenset({Identity.GATEWAY}), frozenset({Identity.WORKER})
_OPERATOR = frozenset({Identity.OPERATOR})
_ANYBODY = frozenset(Identity)

CALLERS: Mapping[str, frozenset[Identity]] = {
    "/baton.v1.Router/Place": _GATEWAY,
    "/baton.v1.Router/EndPlacement": _GATEWAY,
    "/baton.v1.Router/ReportGateway": _GATEWAY,
    "/baton.v1.Router/Join": _WORKER,
    "/baton.v1.Router/Status": _OPERATOR | _GATEWAY,
    "/baton.v1.Router/FindRecords": _OPERATOR | _GATEWAY,
    "/baton.v1.Router/Watch": _OPERATOR | _GATEWAY,
    "/baton.v1.Router/Drain": _OPERATOR,
    "/baton.v1.Router/Flip": _OPERATOR,
    "/baton.v1.Router/Scale": _OPERATOR,
    "/baton.v1.Router/StartRollout": _OPERATOR,
    "/baton.v1.Router/WatchPools": _OPERATOR,
    "/baton.v1.Router/ReportPools": _OPERATOR,
    "/baton.v1.Prefill/Prefill": _GATEWAY,
    "/baton.v1.Prefill/AbortPrefill": _GATEWAY,
    "/baton.v1.Decode/Admit": _GATEWAY,
    "/baton.v1.Decode/AbortDecode": _GATEWAY,
    "/baton.v1.Decode/Outputs": _GATEWAY,
    "/baton.v1.Decode/CheckPair": _OPERATOR,
    "/baton.v1.Handoff/Connect": _WORKER,
    "/grpc.health.v1.Health/Check": _ANYBODY,
    "/grpc.health.v1.Health/Watch": _ANYBODY,
    "/grpc.health.v1.Health/List": _ANYBODY,
}
"""A method that is not here is served to nobody."""


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Asks every client for a certificate; follows the files."""

    def fetch() -> Any:
        material = credentials.current()
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    return grpc.dynamic_ssl_server_credentials(fetch(), fetch, require_client_authentication=True)


class IdentityInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers that a method is not for, before anything of theirs is read. Raises NotAllowed within the call:
    it belongs behind :class:`rpc.errors.ErrorInterceptor`."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

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
            behavior = handler.stream_stream or handler.unary_stream
            wrapped, kinds = (
                self._checked_stream(behavior, method),
                (
                    grpc.unary_stream_rpc_method_handler,
                    grpc.stream_stream_rpc_method_handler,
                ),
            )
        else:
            behavior = handler.stream_unary or handler.unary_unary
            wrapped, kinds = (
                self._checked_unary(behavior, method),
                (
                    grpc.unary_unary_rpc_method_handler,
                    grpc.stream_unary_rpc_method_handler,
                ),
            )
        return kinds[handler.request_streaming](wrapped, handler.request_deserializer, handler.response_serializer)

    def _checked_unary(self, behavior: Any, method: str) -> Any:
        async def checked(request: Any, context: Any) -> Any:
            refusal = self._refusal(method, context)
            if refusal is not None:
                raise refusal
            return await behavior(request, context)

        return checked

    def _checked_stream(self, behavior: Any, method: str) -> Any:
        def checked(request: Any, context: Any) -> AsyncIterator[Any]:
            refusal = self._refusal(method, context)
            responses: AsyncIterator[Any] = behavior(request, context) if refusal is None else _refuse(refusal)
            return responses

        return checked

    def _refusal(self, method: str, context: Any) -> NotAllowed | None:
        names = [name.decode("ascii", "replace") for name in context.auth_context().get("peer_dns", ())]
        may = CALLERS.get(method, frozenset())
        if self._credentials.identities(names) & may:
            return None
        wanted = " or ".join(self._credentials.name(identity) for identity in sorted(may)) or "nobody"
        said = ", ".join(names) or "nobody"
        return NotAllowed(f"{method.rpartition('/')[2]} is for {wanted}; the caller's certificate names {said}")


async def _refuse(refusal: NotAllowed) -> AsyncIterator[Any]:
    raise refusal
    yield
