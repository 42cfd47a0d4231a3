"""The error tree of the cluster.

::

    ServingError
      RequestError       never retried   InvalidRequest 400 | ContextTooLong 400 | ModelNotFound 404 | NotAllowed 403
      CapacityError      try later       RateLimited 429 | QuotaExceeded 429 | QueueFull 503 | TooManyWaiting 429
                                         | Overloaded 503 | NoWorker 503 | OutOfBlocks 503
      TransferError      re-fetch or re-prefill   LeaseExpired | StaleLease | DigestMismatch | TransferStalled
                                         | PeerLost
                                         | LayoutMismatch | BackendFailed
      WorkerError        re-place        WorkerLost | WorkerDraining | StaleIncarnation
      DeadlineExceeded 504 | Cancelled 499 | InternalError 500
      ConfigError        refused at start (never crosses the wire)

Each class has a stable ``slug`` (crosses gRPC in trailing metadata; the client rebuilds the class from it), a gRPC
status name, an HTTP status, a ``recovery`` and a ``blame``. ``recovery`` is read in one place, ``gateway/pipeline.py``.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar


class Recovery(StrEnum):
    """What can still be done for the request."""

    NONE = "none"
    LATER = "later"
    """Place again without spending an attempt: there was no room."""
    REFETCH = "refetch"
    """The KV is held still: another decode worker may fetch it; prefill again when it cannot be had."""
    REPLACE = "replace"
    """Place again without the blamed worker or pair. What a prefill worker holds is of use only when a decode worker is
    to blame."""


class Blame(StrEnum):
    """Whom a new placement must avoid."""

    WORKER = "worker"
    PAIR = "pair"
    NONE = "none"


class ServingError(Exception):
    """Root of every error that a client of the cluster may meet. ``message`` is safe to show."""

    slug: ClassVar[str] = "serving_error"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    http_type: ClassVar[str] = "server_error"
    recovery: ClassVar[Recovery] = Recovery.NONE
    blame: ClassVar[Blame] = Blame.NONE

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        worker_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Dotted path of the offending request field, if there is one."""
        self.code = code or self.slug
        """The ``code`` of the HTTP error object; the slug unless something more exact is known."""
        self.worker_id = worker_id
        """The worker that a re-placement should avoid, if known."""
        self.retry_after_s = retry_after_s
        """When the same request may succeed, if known; infinity: never as it is."""


class RequestError(ServingError):
    slug = "request_error"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    http_type = "invalid_request_error"


class InvalidRequest(RequestError):
    slug = "invalid_request"


class ContextTooLong(RequestError):
    slug = "context_length_exceeded"


class ModelNotFound(RequestError):
    slug = "model_not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404


class NotAllowed(RequestError):
    slug = "not_allowed"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    http_type = "permission_error"


class CapacityError(ServingError):
    slug = "capacity_error"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 503
    http_type = "service_unavailable_error"
    recovery = Recovery.LATER


class RateLimited(CapacityError):
    slug = "rate_limit_exceeded"
    http_status = 429
    http_type = "rate_limit_error"
    recovery = Recovery.NONE


class QuotaExceeded(CapacityError):
    slug = "insufficient_quota"
    http_status = 429
    http_type = "insufficient_quota"
    recovery = Recovery.NONE


class QueueFull(CapacityError):
    slug = "queue_full"


class TooManyWaiting(QueueFull):
    """The router's queue is full, or the tenant's share of it: whoever asks less often finds a place."""

    slug = "too_many_waiting"
    http_status = 429
    http_type = "rate_limit_error"
    recovery = Recovery.NONE


class Overloaded(CapacityError):
    """It would wait for room at workers for longer than it may, or has."""

    slug = "overloaded"
    recovery = Recovery.NONE


class NoWorker(CapacityError):
    slug = "no_worker"
    grpc_status = "UNAVAILABLE"
    recovery = Recovery.NONE


class OutOfBlocks(CapacityError):
    slug = "out_of_blocks"


class TransferError(ServingError):
    slug = "transfer_error"
    grpc_status = "ABORTED"
    http_status = 503
    http_type = "service_unavailable_error"
    recovery = Recovery.REFETCH
    blame = Blame.PAIR


class LeaseExpired(TransferError):
    slug = "lease_expired"
    recovery = Recovery.REPLACE
    blame = Blame.NONE


class StaleLease(TransferError):
    slug = "stale_lease"
    recovery = Recovery.REPLACE
    blame = Blame.NONE


class DigestMismatch(TransferError):
    slug = "digest_mismatch"
    recovery = Recovery.REPLACE


class TransferStalled(TransferError):
    slug = "transfer_stalled"


class PeerLost(TransferError):
    slug = "peer_lost"


class LayoutMismatch(TransferError):
    slug = "layout_mismatch"
    recovery = Recovery.REPLACE


class BackendFailed(TransferError):
    slug = "backend_failed"


class TicketRefused(TransferError):
    """Of the router's word that a worker may take a hand-off: a new placement brings a new one."""

    slug = "ticket_refused"
    recovery = Recovery.REPLACE
    blame = Blame.NONE


class WorkerError(ServingError):
    slug = "worker_error"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    http_type = "service_unavailable_error"
    recovery = Recovery.REPLACE
    blame = Blame.WORKER


class WorkerLost(WorkerError):
    slug = "worker_lost"


class WorkerDraining(WorkerError):
    slug = "worker_draining"


class StaleIncarnation(WorkerError):
    slug = "stale_incarnation"


class DeadlineExceeded(ServingError):
    slug = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    http_type = "timeout_error"


class Cancelled(ServingError):
    slug = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499
    http_type = "invalid_request_error"


class InternalError(ServingError):
    slug = "internal_error"
    recovery = Recovery.REPLACE
    blame = Blame.WORKER


class ConfigError(ServingError):
    """Refused at start: a bad configuration key, an unreadable model file, a taken port. One line that says how to mend
    it."""

    slug = "config_error"
    grpc_status = "FAILED_PRECONDITION"


def _tree(cls: type[ServingError]) -> Iterator[type[ServingError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


ERRORS_BY_SLUG: dict[str, type[ServingError]] = {cls.slug: cls for cls in _tree(ServingError)}


def error_from_slug(
    slug: str,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    worker_id: str | None = None,
    retry_after_s: float | None = None,
) -> ServingError:
    """Rebuild an error that crossed the wire. An unknown slug (a newer peer) becomes :class:`InternalError`."""
    cls = ERRORS_BY_SLUG.get(slug, InternalError)
    return cls(message, param=param, code=code, worker_id=worker_id, retry_after_s=retry_after_s)
