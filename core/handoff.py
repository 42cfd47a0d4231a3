"""The messages of the hand-off: one control stream per P-D pair, dialled by D, served by P (design.md 4).

D to P: Hello, Open, Claim, Renew, Release, AbortHandoff. P to D: Welcome, Ready, Sealed, Refused, Ended. Each is
idempotent by lease and epoch. Order is not assumed: messages for unknown ids wait up to ``lease_s``,
aborts leave tombstones. Block ids cross the wire, never descriptors; durations, never absolute times.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from core.ids import HandoffId, Incarnation, LeaseId, RequestId, WorkerId
from core.kv import KVFormat, KVGeometry
from core.types import FirstToken


class DigestKind(StrEnum):
    OFF = "off"
    WSUM64 = "wsum64"
    CRC32 = "crc32"


class TransferMode(StrEnum):
    """Who moves the bytes of a link: D READs one-sidedly, or the owner SERVEs what D's backend asks it for."""

    READ = "read"
    SERVE = "serve"


class HandoffOutcome(StrEnum):
    """How a claim ended at D. A closed set: also the label of metrics and spans."""

    OK = "ok"
    STALE_LEASE = "stale_lease"
    DIGEST_MISMATCH = "digest_mismatch"
    PEER_LOST = "peer_lost"
    STALLED = "stalled"
    ABORTED = "aborted"
    INCOMPATIBLE = "incompatible"
    NO_CAPACITY = "no_capacity"
    BACKEND_FAILED = "backend_failed"

    @property
    def ends_lease(self) -> bool:
        """Nobody is to read the blocks any more: they were taken, or the request is over, or they are not what they
        should be. After any other outcome only the claim is over, and another reader may make its own."""
        return self not in _ENDS_CLAIM


_ENDS_CLAIM = (
    HandoffOutcome.PEER_LOST,
    HandoffOutcome.STALLED,
    HandoffOutcome.NO_CAPACITY,
    HandoffOutcome.BACKEND_FAILED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInfo:
    """How a worker's memory is reached by one backend. ``metadata`` is opaque to everybody but that backend."""

    backend: str
    agent_name: str
    """Contains the incarnation."""
    metadata: bytes
    regions: tuple[tuple[str, int, int], ...]
    """(region name, address, bytes) as advertised: an address is used only inside these."""
    mode: TransferMode = TransferMode.READ


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """One side of a pair, as told in Hello and Welcome."""

    worker_id: WorkerId
    incarnation: Incarnation
    format: KVFormat
    geometry: KVGeometry
    link: LinkInfo
    other_links: tuple[LinkInfo, ...] = ()
    """The same memory by other backends, for pairs that cannot use the first."""
    canary_digest: bytes = b""
    """BLAKE2b (16 bytes) of the region ``canary``, which a reader reads and checks before it uses the link."""

    def by(self, backend: str) -> "PeerInfo | None":
        """This peer as that backend reaches it (``link`` is the backend's); None when it is not offered."""
        for link in (self.link, *self.other_links):
            if link.backend == backend:
                return replace(self, link=link, other_links=())
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasure:
    """One link of a pair, as measured over P's canary. Rates are 0 where it did not get so far."""

    backend: str
    mode: TransferMode
    lane: str
    """What carries the bytes, as far as it can be seen."""
    is_used: bool
    connect_s: float
    latency_s: float
    """The fastest read of 64 bytes."""
    bytes_per_s: float
    memcpy_bytes_per_s: float
    """Copying the same bytes within D."""
    slug: str = ""
    """Of the error that keeps it from being used."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    """What an operator is told of a live pair."""

    prefill: WorkerId
    decode: WorkerId
    circuit: str
    circuit_why: str
    """The last failure that counted."""
    reason: str
    """Why this link is used, or why none is."""
    links: tuple[LinkMeasure, ...]

    @property
    def is_good(self) -> bool:
        return any(link.is_used for link in self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """D introduces itself; the first message of the stream. Formats are compared before anything else is used."""

    peer: PeerInfo
    ticket: bytes = b""
    """Of the router, for this pair: where tickets are asked for, P tells nothing of its memory without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    peer: PeerInfo
    lease_s: float
    """The holder's lease time; renew well before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """D asks for the hand-off and says what it already holds. Claims it for ``attempt``."""

    handoff_id: HandoffId
    request_id: RequestId
    attempt: int
    num_held_blocks: int = 0
    ticket: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Makes this D the holder of an existing hand-off (e.g. after another D failed); only its Release counts then."""

    handoff_id: HandoffId
    request_id: RequestId
    attempt: int
    num_held_blocks: int = 0
    ticket: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRef:
    lease_id: LeaseId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Complete, fenced, immutable blocks so far (early reads)."""

    handoff_id: HandoffId
    attempt: int
    """Of the claim that it answers; so in Sealed and Ended."""
    lease: LeaseRef
    slot: int
    first_block: int
    """Index of ``block_ids[0]`` within the sequence."""
    block_ids: tuple[int, ...]
    traceparent: str = ""
    """Of P's span of the last of them: what D's reading of them is linked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The right to read: all blocks of the sequence under one lease."""

    lease: LeaseRef
    slot: int
    """Index of the lease slot in the region ``slots``."""
    block_ids: tuple[int, ...]
    """P's blocks, in token order, from the first block D does not hold."""
    first_block: int
    num_tokens: int
    """Tokens whose KV is in the blocks of the whole sequence: prompt and accepted tokens, not the first token."""
    digest: DigestKind
    digests: bytes
    """Little-endian uint64 for each (block, kv head), block first; empty with ``off``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The hand-off is complete. ``first_tokens`` travel whole: after D's commit P's death is no error."""

    handoff_id: HandoffId
    attempt: int
    grant: Grant
    first_tokens: tuple[FirstToken, ...]
    traceparent: str = ""
    """Of P's span that holds the blocks: what D's transfer is linked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """P will not (or no longer) hand this off; an error slug and text of core.errors."""

    handoff_id: HandoffId
    attempt: int
    slug: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """What has no lease yet is opened again instead."""

    leases: tuple[LeaseRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The claimant is done: the lease ends, or the claim alone (``HandoffOutcome.ends_lease``). Idempotent, an unknown
    or old (lease, epoch) changes nothing."""

    handoff_id: HandoffId
    lease: LeaseRef
    attempt: int
    outcome: HandoffOutcome
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortHandoff:
    """D gives up before it knows a lease. What it opened is not waited for any more; a lease ends as by Release."""

    handoff_id: HandoffId
    attempt: int
    outcome: HandoffOutcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A lease ended at P without the claimant's Release, or somebody else holds it now."""

    handoff_id: HandoffId
    attempt: int
    lease: LeaseRef
    slug: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRead:
    """D has tried to read P's canary over its link: P waits for it before it says that it is ready."""

    error: str = ""
    """Empty: what was read is what it should be."""


ToHolder = Hello | Open | Claim | Renew | Release | AbortHandoff | CanaryRead
"""What D sends to P."""

ToReader = Welcome | Ready | Sealed | Refused | Ended
"""What P sends to D."""
