"""What really moves bytes. ``create_backend`` is the one place that knows the names."""

from core.credentials import Credentials
from core.errors import ConfigError
from kvtransfer.backends.base import Backend
from kvtransfer.backends.inproc import Fabric
from kvtransfer.backends.tcp import tcp_backend


def create_backend(
    name: str, *, host: str = "127.0.0.1", fabric: Fabric | None = None, credentials: Credentials | None = None
) -> Backend:
    """The backend of ``transfer.backend``. ``host`` is where a backend that serves its memory itself listens, and
    ``credentials`` what its connections prove, in a cluster with TLS.

    Raises ConfigError for an unknown name or one that cannot be used here.
    """
    if name == "nixl":
        # Imported on use: loading the libraries takes 0.1 s and reads the environment.
        from kvtransfer.backends.nixl import NixlBackend

        return NixlBackend()
    if name == "tcp":
        return tcp_backend(host, credentials)
    if name == "dist":
        from kvtransfer.backends.dist import dist_backend  # loads torch's collectives

        return dist_backend(host)
    if name == "inproc":
        if fabric is None:
            raise ConfigError(
                "transfer.backend: 'inproc' moves KV inside one process only; use 'nixl', 'tcp' or 'dist'"
            )
        return fabric.backend()
    raise ConfigError(f"transfer.backend: {name!r} is unknown; use 'nixl', 'tcp' or 'dist'")
