"""Identities. Every process has an id (stable over restarts) and an incarnation (fresh at each start)."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
PlacementId = NewType("PlacementId", str)
HandoffId = NewType("HandoffId", str)
LeaseId = NewType("LeaseId", int)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
Incarnation = NewType("Incarnation", int)
"""Random 64 bits, drawn at process start and never zero. Zero on the wire means "not given" and is refused."""


def new_incarnation() -> Incarnation:
    """A fresh incarnation: 63 random bits, never zero (63, so that it fits every signed 64-bit reader)."""
    return Incarnation(secrets.randbits(63) | 1)


def new_request_id() -> RequestId:
    """A cluster-wide request id. It is always ours: a caller's own id is only ever a label."""
    return RequestId(secrets.token_hex(16))


def new_handoff_id() -> HandoffId:
    """The name under which prefill and decode meet. One for each attempt of a request."""
    return HandoffId(secrets.token_hex(16))


def new_placement_id() -> PlacementId:
    """Names one placement, so that its end can be reported exactly once."""
    return PlacementId(secrets.token_hex(12))


def format_incarnation(incarnation: int) -> str:
    """The spelling people see: 16 hex digits."""
    return f"{incarnation:016x}"
