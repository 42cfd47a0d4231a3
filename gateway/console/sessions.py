"""Sessions of the console: a cookie that says until when it holds, signed with the admin key.

Nothing is stored: every gateway that has the key knows its sessions, and none outlives the key. The key itself is sent
once, to make the session, and never kept in the browser. What the cookie opens is read by GET and changes nothing.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

COOKIE = "baton_console"
SESSION_S = 12 * 3600
_PURPOSE = b"baton console session\n"


class Sessions:
    """``wall`` is the time of the day: other gateways read it too."""

    def __init__(self, admin_key: str, wall: Callable[[], float]) -> None:
        self._secret = hashlib.sha256(_PURPOSE + admin_key.encode()).digest()
        self._wall = wall

    def issue(self) -> str:
        """A new session's value."""
        content = f"{int(self._wall()) + SESSION_S}.{secrets.token_hex(8)}"
        return f"{content}.{self._signature(content)}"

    def holds(self, value: str) -> bool:
        content, _, signature = value.rpartition(".")
        until = content.partition(".")[0]
        # Bytes: a header may hold any character, and strings beyond ASCII cannot be compared in constant time.
        if not hmac.compare_digest(signature.encode("latin-1", "replace"), self._signature(content).encode()):
            return False
        return self._wall() < int(until)

    def _signature(self, content: str) -> str:
        return hmac.new(self._secret, content.encode("latin-1", "replace"), hashlib.sha256).hexdigest()


def session_of(cookies: str) -> str:
    """The session's value in a Cookie header, or ""."""
    try:
        found = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def cookie(value: str, *, is_secure: bool) -> bytes:
    """The header that sets a session; an empty value ends it."""
    lasts = SESSION_S if value else 0
    secure = "; Secure" if is_secure else ""
    return f"{COOKIE}={value}; Path=/console; HttpOnly; SameSite=Strict; Max-Age={lasts}{secure}".encode()
