"""Cross-origin calls from browsers, for the pages that the operator names. Plain ASGI; off unless it is configured.

Keys travel in a header that the page's own code sets, so credentials of the browser's (cookies) are never allowed.
"""

import re
from collections.abc import Awaitable, Callable

from core.config import CorsConfig
from gateway.http import Header, Message, Receive, Scope, Send, header

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
EXPOSED = (
    b"x-request-id, retry-after, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
VARY: Header = (b"vary", b"origin")


class Cors:
    """Answers preflights of named origins and marks answers to them. All other calls pass as they are."""

    def __init__(self, app: Application, config: CorsConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else ""
        if not origin or not self._is_named(origin):
            await self._app(scope, receive, send)
            return
        allow: Header = (b"access-control-allow-origin", origin.encode("latin-1"))
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            headers = [allow, VARY, *self._preflight_headers(scope)]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed: Header = (b"access-control-expose-headers", EXPOSED)
                message["headers"] = [*message["headers"], allow, VARY, exposed]
            await send(message)

        await self._app(scope, receive, send_marked)

    def _is_named(self, origin: str) -> bool:
        return "*" in self._config.origins or origin in self._config.origins

    def _preflight_headers(self, scope: Scope) -> list[Header]:
        """Any plain header name is allowed: official clients send a dozen of their own."""
        names = header(scope, b"access-control-request-headers")
        asked = names if HEADER_NAMES.fullmatch(names) else "authorization, content-type"
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", asked.encode("latin-1")),
            (b"access-control-max-age", str(self._config.max_age_s).encode()),
        ]
