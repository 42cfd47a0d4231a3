"""The OpenAPI page, made of the schemas that read the bodies and the tables of routes and members: it cannot drift."""

from collections.abc import Collection, Mapping
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

from gateway.edge import Exchange, Handle
from gateway.fields import ROUTES, Verdict
from gateway.http import Receive, Scope, Send, send_bytes
from gateway.operations import JSON_MEDIA, OPERATIONS, Operation

Schema = dict[str, Any]
"""A piece of the page; its shape is OpenAPI's."""

OPENAPI_PATH = "/openapi.json"
REFS = "#/components/schemas/{model}"
REASONS = {
    200: "The answer.",
    201: "Made.",
    400: "The request is not valid; `param` names the member.",
    401: "There is no key, or it is not valid.",
    403: "The key is not allowed to do this.",
    404: "There is no such path or model.",
    405: "The path has other methods; `Allow` names them.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    431: "The request line and the headers are too large.",
    429: "A rate, a budget or a number of streams is used up, or too many requests wait. `Retry-After` says how long.",
    500: "A mistake of ours; the message has the request's id.",
    503: "No worker can take this now (in time), or the gateway is stopping. `Retry-After` says when to come back.",
    504: "The deadline passed before the first token.",
}


def openapi_page(served: Collection[tuple[str, str]]) -> Handle:
    """The handler that shows the page of the routes that are served: (method, path)."""
    body = orjson.dumps(document(served))

    async def show(exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, body)

    return show


def document(served: Collection[tuple[str, str]]) -> Schema:
    operations = [one for one in OPERATIONS if (one.method, one.path) in served]
    bodies = [one.body for one in operations if one.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REFS)
    definitions: Schema = dict(schemas.get("$defs", {}))
    for operation in operations:
        if operation.body is not None and operation.route:
            _tell_members(definitions[operation.body.__name__], operation.route)
    definitions["Error"] = _error_schema()
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": "The OpenAI API, and what vLLM adds to it."},
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> Schema:
    page: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}{operation.path.replace('/', '_').replace('.', '_')}",
        "security": [] if operation.who == "anyone" else [{"key": []}],
        "responses": {str(operation.status): _success(operation)},
    }
    for status in operation.statuses:
        page["responses"][str(status)] = {
            "description": REASONS[status],
            "content": {JSON_MEDIA: {"schema": {"$ref": REFS.format(model="Error")}}},
        }
    if operation.body is not None:
        reference = {"$ref": REFS.format(model=operation.body.__name__)}
        page["requestBody"] = {"required": True, "content": {JSON_MEDIA: {"schema": reference}}}
    parameters: list[Schema] = [
        {"name": name, "in": "query", "description": note, "schema": {"type": "string"}}
        for name, note in operation.query.items()
    ]
    parameters += [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    if parameters:
        page["parameters"] = parameters
    return page


def _success(operation: Operation) -> Schema:
    content: Schema = {media: {"schema": {"type": "string"}} for media in operation.media}
    if JSON_MEDIA in content:
        content[JSON_MEDIA] = {"schema": {"type": "object", "required": list(operation.answer)}}
    return {"description": REASONS[operation.status], "content": content}


def _tell_members(schema: Schema, route: str) -> None:
    """Adds what the table says: notes, and the members that are refused or ignored."""
    properties: Schema = schema["properties"]
    for name, rule in ROUTES[route].items():
        match rule.verdict:
            case Verdict.HONOURED:
                if rule.note:
                    properties[name] = {**properties[name], "description": rule.note}
            case Verdict.REFUSED:
                properties[name] = {"enum": [None, *rule.neutral], "description": f"Not built. {rule.note}".strip()}
            case Verdict.IGNORED:
                properties[name] = {"description": f"Ignored. {rule.note}".strip()}


def _error_schema() -> Schema:
    text: Mapping[str, object] = {"type": "string"}
    nullable: Mapping[str, object] = {"type": ["string", "null"]}
    members = {"message": text, "type": text, "param": nullable, "code": nullable}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": list(members), "properties": members}},
    }
