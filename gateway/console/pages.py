"""The files of the page, read once. No names from outside are opened: only what lies here is served."""

import hashlib
from pathlib import Path

from gateway.edge import Exchange, Handle
from gateway.http import Header, Receive, Scope, Send, header, send_bytes

ASSETS = Path(__file__).with_name("assets")
KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
GUARDS: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
"""The page runs its own code and talks to where it came from, and nobody shows it within his."""


def pages() -> dict[str, Handle]:
    """The handler of each path."""
    files = {f"/console/{path.name}": _file(path) for path in sorted(ASSETS.iterdir()) if path.suffix in KINDS}
    page = files.pop("/console/index.html")
    return {"/console": page, "/console/": page, **files}


def _file(path: Path) -> Handle:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = ((b"content-type", KINDS[path.suffix]), (b"etag", tag.encode()), *GUARDS)

    async def show(exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        if header(scope, b"if-none-match") == tag:
            await send_bytes(send, 304, b"", headers)
        else:
            await send_bytes(send, 200, body, headers)

    return show
