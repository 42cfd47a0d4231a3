"""The address by which others reach this machine, where ``worker.host`` is ``auto``."""

import socket
import time

from core.config import ClusterConfig, split_address
from core.errors import ConfigError

RESOLVE_S = 60.0
"""A name of the router may come into being after its workers."""
_RETRY_S = 0.5


def with_own_address(config: ClusterConfig, *, limit_s: float = RESOLVE_S) -> ClusterConfig:
    """The same configuration with an address in place of ``auto``: that of the interface which leads to the router.
    Nothing is sent for it. Raises ConfigError with the remedy."""
    if config.worker.host != "auto":
        return config
    ends_at = time.monotonic() + limit_s
    while True:
        try:
            host = _towards(*split_address(config.router.address))
        except OSError as error:
            if time.monotonic() >= ends_at:
                raise ConfigError(
                    f"worker.host is auto, and no IPv4 way leads to the router at {config.router.address} ({error}): "
                    "correct router.advertise, or name this machine's address as worker.host"
                ) from None
            time.sleep(_RETRY_S)
            continue
        return config.model_copy(update={"worker": config.worker.model_copy(update={"host": host})})


def _towards(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
