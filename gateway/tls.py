"""The gateway's certificate, and its renewal while it serves."""

import asyncio
import logging
import os
import ssl

from core.config import TlsConfig
from core.errors import ConfigError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""Of each file: when it changed, its size, its inode. A renewal by renaming or by a moved link shows as well."""


class Certificate:
    """One TLS context, whose certificate follows the files. Connections that stand keep the one they began with."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError that says how to mend it."""
        self._config = config
        try:
            self._loaded = self._stamp()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"gateway.tls: {_reason(config, error)}") from None

    async def follow(self) -> None:
        """Looks at the files every `reload_s`. A pair that cannot be used yet is tried again; the old one serves on."""
        while True:
            await asyncio.sleep(self._config.reload_s)
            await self.refresh()

    async def refresh(self) -> bool:
        """Takes the files' certificate if they changed since the last time. Whether it did."""
        try:
            stamp = await asyncio.to_thread(self._stamp)
            if stamp == self._loaded:
                return False
            await asyncio.to_thread(self._read)  # into a context of its own: half a renewal must not spoil the one used
            self.context.load_cert_chain(self._config.cert, self._config.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate not renewed", extra={"reason": _reason(self._config, error)})
            return False
        self._loaded = stamp
        log.info("certificate renewed")
        return True

    def _stamp(self) -> Stamp:
        stats = [os.stat(path) for path in (self._config.cert, self._config.key)]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._config.cert, self._config.key, password=_no_password)
        return context


def _no_password() -> str:
    """Without it OpenSSL asks the terminal, and a server waits there for ever."""
    return ""


def _reason(config: TlsConfig, error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (
            f"{config.cert} and {config.key} are no certificate with its key ({error.reason or 'unreadable'}): both "
            "must be PEM, the key without a password and the certificate's own"
        )
    return f"cannot read {error.filename}: {error.strerror}; check the path"
