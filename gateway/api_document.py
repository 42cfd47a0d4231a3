"""Writes docs/api.md out of the tables that the gateway itself reads: ``python -m gateway.api_document``."""

import json
from collections.abc import Iterable, Iterator

from core.errors import CapacityError, ConfigError, RequestError, ServingError, TransferError, WorkerError
from gateway.edge import CLIENT_GONE_STATUS
from gateway.fields import ROUTES, FieldRule, Verdict
from gateway.openapi import REASONS
from gateway.operations import OPERATIONS, Operation
from gateway.server import MalformedRequest

NOT_OF_HTTP = (ServingError, RequestError, CapacityError, TransferError, WorkerError, ConfigError)
"""Kinds of errors, and what only an operator meets."""
WHO = {"key": "a key", "admin": "the admin key", "anyone": "anyone"}

INTRODUCTION = """\
# The HTTP API

This page is generated (`make docs`) from the tables that the gateway reads itself; `make check` fails when it is
old. The same tables make the OpenAPI page of a running gateway, `GET /openapi.json`.

Base URL for OpenAI clients: `http://HOST:PORT/v1`. Bodies are JSON objects with `content-type: application/json`,
nested at most 64 deep, without NaN or infinities; a member that is null counts as absent. Members that this page
does not name are ignored and counted in `baton_gateway_unknown_fields`, or refused where `gateway.unknown_fields`
is `refuse`.
"""

ERRORS = """\
## Errors

Every error of every route is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`; `param` is the
dotted path of a member, or null. Some errors have a `code` more exact than those below, such as `invalid_value` or
`unsupported_parameter`.

"""

STREAMS = """\
## Streams

`stream: true` answers with server-sent events. Whatever can be checked is checked before the first of them, so that
a wrong request has its 4xx; the status line waits for the first token.

- Chats and completions send chunks and then `data: [DONE]`. A chat begins each choice with one chunk that has the
  role, and ends it with one that has the `finish_reason`; every other chunk has text, scores, reasoning or a piece
  of a call. With `stream_options.include_usage` a last chunk has the usage and no choices, and all others have
  `usage: null`. A stream that breaks ends with `data: {"error": ...}` and `[DONE]`.
- Responses send named events, numbered from 0 without holes: `response.created`, `response.in_progress`, then for
  each item `response.output_item.added`, its parts and deltas, and `response.output_item.done`; last
  `response.completed`, `response.incomplete` (the limit of tokens) or `response.failed`. There is no `[DONE]`.

Sent text is never taken back, a character is sent whole, and text that may still become a stop is held. The joined
deltas are the plain answer. A run that ends inside a character ends with one U+FFFD, in both forms; scores have the
true bytes. A log probability of minus infinity is written -9999.0.
"""

HEADERS = """\
## Headers

| Header | |
| --- | --- |
| `x-request-id` | on every answer: our id of the request, which all workers log. A caller's own is a label |
| `authorization: Bearer sk-baton-...` | the key, once there are keys (docs/operations.md) |
| `x-ratelimit-*`, `retry-after`, `x-should-retry` | how the key's rates stand, and whether and when to come back |
| `x-baton-timing: 1` | asks for the member `timing`: where the time of this request went |
| `traceparent` | the caller's trace goes on through all workers |
"""


def render() -> str:
    parts = [INTRODUCTION, _routes(), _errors(), STREAMS, HEADERS]
    parts += [_members(operation) for operation in OPERATIONS if operation.route]
    return "\n".join(parts)


def _routes() -> str:
    rows = ((f"`{one.method} {one.path}`", WHO[one.who], one.summary) for one in OPERATIONS)
    return "## Routes\n\n" + _table(("Route", "For", ""), rows)


def _errors() -> str:
    kinds = [one for one in _tree(ServingError) if one not in NOT_OF_HTTP and one.slug != ConfigError.slug]
    assert MalformedRequest in kinds, "what the server refuses before a request reaches a route"
    codes: dict[tuple[int, str], set[str]] = {}
    for one in kinds:
        if one.http_status != CLIENT_GONE_STATUS:
            codes.setdefault((one.http_status, one.http_type), set()).add(f"`{one.slug}`")
    rows = (
        (str(status), f"`{kind}`", ", ".join(sorted(codes[status, kind])), REASONS[status])
        for status, kind in sorted(codes)
    )
    return ERRORS + _table(("Status", "`type`", "`code`", ""), rows)


def _tree(cls: type[ServingError]) -> Iterator[type[ServingError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


def _members(operation: Operation) -> str:
    rules = ROUTES[operation.route].values()
    honoured = [rule for rule in rules if rule.verdict is Verdict.HONOURED]
    function = honoured[0].test_of(operation.route).partition("[")[0]
    parts = [
        f"## Members of `{operation.method} {operation.path}`\n",
        f"The test of an honoured member is `{function}`\n"
        "with the id in its row; it fails when the member is dropped.\n",
        _table(
            ("Honoured", "", "Test"),
            ((f"`{rule.name}`", rule.note, f"`[{operation.route}-{rule.name}]`") for rule in honoured),
        ),
    ]
    refused = [rule for rule in rules if rule.verdict is Verdict.REFUSED]
    if refused:
        parts.append(
            _table(
                ("Refused (400)", "Let through", ""),
                ((f"`{rule.name}`", _neutral(rule), rule.note) for rule in refused),
            )
        )
    ignored = [rule for rule in rules if rule.verdict is Verdict.IGNORED]
    if ignored:
        parts.append(_table(("Ignored", ""), ((f"`{rule.name}`", rule.note) for rule in ignored)))
    return "\n".join(parts)


def _neutral(rule: FieldRule) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in (None, *rule.neutral))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head]]
    lines += [["---"] * len(lines[0]), *([*row] for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    print(render(), end="")
