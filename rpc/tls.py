"""TLS of a connection that we make: we show our certificate, and the peer's must name who we want."""

import asyncio
import ssl
from dataclasses import dataclass

from core.credentials import Credentials, describe_der
from core.security_config import Identity

_SHUTDOWN_S = 1.0
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """What both sides of a connection have to prove."""

    credentials: Credentials
    peer: Identity

    async def connect(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, host: str, port: int) -> None:
        """Raises OSError that says what is wrong with the peer's certificate."""
        name = self.credentials.name(self.peer)
        try:
            await loop.create_connection(
                lambda: protocol,
                host,
                port,
                ssl=self.credentials.current().client,
                server_hostname=name,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except ssl.SSLCertVerificationError as error:
            shown = await _look(loop, host, port)
            raise OSError(f"its certificate is not good for {name}: {error.verify_message}{shown}") from None
        except ssl.SSLError as error:
            raise OSError(f"it does not speak TLS as we do ({error.reason}): is it of this cluster?") from None

    @property
    def doubt(self) -> str:
        """What a peer that hangs up may have against us."""
        files = self.credentials.files
        return f"its log says whether it takes {files.cert}, and whether its CA is ours ({files.ca})"


async def _look(loop: asyncio.AbstractEventLoop, host: str, port: int) -> str:
    """What the certificate says that was refused, for the message; nothing is sent to whoever showed it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_LOOK_S):
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port, ssl=context)
    except (OSError, TimeoutError):
        return ""
    try:
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return "" if shown is None else f"; {describe_der(shown)}"
    finally:
        transport.abort()
