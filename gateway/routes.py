"""The small routes: models, tokens, probes. (Generation has its own module.)"""

import orjson

from core.config import LimitsConfig
from core.errors import InvalidRequest, NoWorker
from core.telemetry import Telemetry, metrics_type
from core.types import ExecutionKind
from gateway.edge import Exchange
from gateway.fields import UnknownFields
from gateway.generation import Generation
from gateway.http import Receive, Scope, Send, header, read_json_body, send_bytes, send_json, until_disconnect
from gateway.models import ModelShelf, ServedModel
from gateway.parse import check_token_ids, tokenize
from gateway.reporter import Reporter
from gateway.schemas import DetokenizeBody, TokenizeBody, parse_body

MAX_DETOKENIZE = 1_000_000


class Routes:
    """The handlers that run no request."""

    def __init__(
        self,
        *,
        shelf: ModelShelf,
        limits: LimitsConfig,
        unknown: UnknownFields,
        generation: Generation,
        reporter: Reporter,
        telemetry: Telemetry,
    ) -> None:
        self._shelf = shelf
        self._limits = limits
        self._unknown = unknown
        self._generation = generation
        self._reporter = reporter
        self._telemetry = telemetry

    # -- models and tokens --------------------------------------------------------------------------------------------

    async def list_models(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        data = [_model_value(model) for model in self._shelf.seen_by(exchange.caller).all()]
        await send_json(send, 200, {"object": "list", "data": data})

    async def show_model(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        models = self._shelf.seen_by(exchange.caller)
        await send_json(send, 200, _model_value(models.get(scope["path_params"]["name"])))

    async def tokenize(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_json_body(scope, receive, self._limits)

        def work() -> bytes:
            body = parse_body(TokenizeBody, raw, self._unknown)
            model = self._shelf.seen_by(exchange.caller).only(body.model)
            token_ids = tokenize(body, model, self._limits)
            return orjson.dumps(
                {
                    "count": len(token_ids),
                    "max_model_len": model.max_context,
                    "tokens": token_ids,
                    "token_strs": [model.tokenizer.token_text(one) for one in token_ids]
                    if body.return_token_strs
                    else None,
                }
            )

        await send_bytes(send, 200, await until_disconnect(scope, receive, self._shelf.run(work, num_bytes=len(raw))))

    async def detokenize(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_json_body(scope, receive, self._limits)

        def work() -> bytes:
            body = parse_body(DetokenizeBody, raw, self._unknown)
            model = self._shelf.seen_by(exchange.caller).only(body.model)
            if len(body.tokens) > MAX_DETOKENIZE:
                raise InvalidRequest(f"'tokens' may hold at most {MAX_DETOKENIZE} ids", param="tokens")
            token_ids = check_token_ids(body.tokens, model, "tokens")
            return orjson.dumps({"prompt": model.tokenizer.decode(token_ids, skip_special_tokens=False)})

        await send_bytes(send, 200, await until_disconnect(scope, receive, self._shelf.run(work, num_bytes=len(raw))))

    # -- probes -------------------------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Alive; says nothing of the cluster."""
        await send_json(send, 200, {"status": "ok"})

    async def ready(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Whether a request would find workers. Reads what the heartbeat learnt; waits for nothing."""
        if self._generation.is_draining:
            raise NoWorker("this gateway is shutting down", code="draining")
        reason = self._reporter.why_not_ready()
        if reason is not None:
            raise NoWorker(f"not ready: {reason}", code="no_backend")
        await send_json(send, 200, {"status": "ready"})

    async def metrics(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        accept = header(scope, b"accept")
        kind = (b"content-type", metrics_type(accept).encode())
        await send_bytes(send, 200, self._telemetry.render_metrics(accept), (kind,))


def _model_value(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_context,
        **({} if model.execution is ExecutionKind.REAL else {"execution": model.execution}),
    }
