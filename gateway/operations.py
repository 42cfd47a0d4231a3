"""What the routes are for, in one table: the OpenAPI page and docs/api.md are made of it.

The routes themselves and their doors stand in `app.py`; a test holds the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from gateway.access.routes import NewKey
from gateway.responses.body import ResponsesBody
from gateway.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

JSON_MEDIA, EVENT_MEDIA, TEXT_MEDIA = "application/json", "text/event-stream", "text/plain"
Who = Literal["key", "admin", "anyone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    method: str
    path: str
    summary: str
    who: Who = "key"
    body: type[BaseModel] | None = None
    route: str = ""
    """Its members' rules in `fields.py`."""
    answer: tuple[str, ...] = ()
    """Members that the answer always has."""
    status: int = 200
    media: tuple[str, ...] = (JSON_MEDIA,)
    query: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[int, ...] = ()
    """Statuses of errors, beside those of every route behind the same door."""

    @property
    def statuses(self) -> tuple[int, ...]:
        """Of all errors that may come."""
        door = {"key": (401, 429, 503), "admin": (401, 403, 503), "anyone": ()}[self.who]
        body = (400, 408, 413, 415) if self.body is not None else ()
        return tuple(sorted({*door, *body, *self.refusals, 500}))


_MODEL = ("id", "object", "created", "owned_by", "max_model_len")
_RUNS = (403, 404, 429, 503, 504)
_USAGE = {"key": "id of a key", "since": "first day, such as 2026-11-30 (UTC)", "until": "last day"}
_KEY = ("id", "object", "tenant", "created_at", "expires_at", "revoked_at")
_DAYS = ("object", "data", "total")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answers a conversation, plain or as a stream of chunks.",
        body=ChatBody,
        route="chat",
        media=(JSON_MEDIA, EVENT_MEDIA),
        answer=("id", "object", "created", "model", "choices", "usage"),
        refusals=_RUNS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continues texts or token ids, plain or as a stream of chunks.",
        body=CompletionBody,
        route="completions",
        media=(JSON_MEDIA, EVENT_MEDIA),
        answer=("id", "object", "created", "model", "choices", "usage"),
        refusals=_RUNS,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        summary="Answers the items of a conversation with items, plain or as a stream of typed events. Stores nothing.",
        body=ResponsesBody,
        route="responses",
        media=(JSON_MEDIA, EVENT_MEDIA),
        answer=("id", "object", "created_at", "status", "model", "output", "usage"),
        refusals=_RUNS,
    ),
    Operation(method="GET", path="/v1/models", summary="The models that the key may use.", answer=("object", "data")),
    Operation(method="GET", path="/v1/models/{name}", summary="One of them.", answer=_MODEL, refusals=(404,)),
    Operation(
        method="POST",
        path="/tokenize",
        summary="The token ids of a text, or of a conversation as a chat would read it.",
        body=TokenizeBody,
        route="tokenize",
        answer=("count", "max_model_len", "tokens", "token_strs"),
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="The text of token ids.",
        body=DetokenizeBody,
        route="detokenize",
        answer=("prompt",),
        refusals=(404,),
    ),
    Operation(
        method="GET", path="/health", summary="200 while the process is alive.", who="anyone", answer=("status",)
    ),
    Operation(
        method="GET",
        path="/ready",
        summary="200 when a request would find workers; else 503 and why.",
        who="anyone",
        answer=("status",),
        refusals=(503,),
    ),
    Operation(
        method="GET",
        path="/metrics",
        summary="Prometheus metrics of this gateway. Without a key where there are no keys or the operator says so.",
        who="admin",
        media=(TEXT_MEDIA,),
    ),
    Operation(method="GET", path="/openapi.json", summary="This page.", answer=("openapi", "paths")),
    Operation(
        method="GET",
        path="/v1/usage",
        summary="What the tenant of the key has used, by day.",
        query=_USAGE,
        answer=_DAYS,
        refusals=(400,),
    ),
    Operation(
        method="POST",
        path="/admin/keys",
        summary="Makes a key. Its text is shown this once.",
        who="admin",
        body=NewKey,
        answer=(*_KEY, "key"),
        status=201,
    ),
    Operation(
        method="GET",
        path="/admin/keys",
        summary="All keys, or those of a tenant, without their secrets.",
        who="admin",
        query={"tenant": "a tenant's name"},
        answer=("object", "data"),
        refusals=(400,),
    ),
    Operation(method="GET", path="/admin/keys/{key_id}", summary="One key.", who="admin", answer=_KEY, refusals=(404,)),
    Operation(
        method="DELETE",
        path="/admin/keys/{key_id}",
        summary="Ends a key.",
        who="admin",
        answer=_KEY,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path="/admin/usage",
        summary="What was used, by day, tenant, key and model.",
        who="admin",
        query={"tenant": "a tenant's name", **_USAGE},
        answer=_DAYS,
        refusals=(400,),
    ),
)
