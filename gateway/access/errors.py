"""What access refuses, beside the errors of `core.errors`."""

from collections.abc import Callable
from enum import StrEnum

from core.errors import CapacityError, Recovery, RequestError


class NotAuthenticated(RequestError):
    slug = "invalid_api_key"
    http_status = 401
    http_type = "authentication_error"


class AccessUnknown(CapacityError):
    """A store that must be asked does not answer, and the setting says to refuse."""

    slug = "access_store_unavailable"
    recovery = Recovery.NONE


class StoreFailure(StrEnum):
    """How a store failed a call that it was asked."""

    TIMEOUT = "timeout"
    ERROR = "error"


OnStoreFailure = Callable[[StoreFailure], None]


def nobody_hears(failure: StoreFailure) -> None:
    pass


class StoreAway(Exception):
    """A store did not answer in time. `reason` is for our log: it may tell of addresses."""

    def __init__(self, store: str, reason: str) -> None:
        super().__init__(f"{store} does not answer: {reason}")
        self.store = store
        self.reason = reason
