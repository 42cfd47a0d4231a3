from rpc.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_MODE_UNSPECIFIED: _ClassVar[TransferMode]
    TRANSFER_MODE_READ: _ClassVar[TransferMode]
    TRANSFER_MODE_SERVE: _ClassVar[TransferMode]

class DigestKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_KIND_UNSPECIFIED: _ClassVar[DigestKind]
    DIGEST_KIND_OFF: _ClassVar[DigestKind]
    DIGEST_KIND_WSUM64: _ClassVar[DigestKind]
    DIGEST_KIND_CRC32: _ClassVar[DigestKind]

class HandoffOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_OUTCOME_UNSPECIFIED: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_OK: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_STALE_LEASE: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_DIGEST_MISMATCH: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_PEER_LOST: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_STALLED: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_ABORTED: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_INCOMPATIBLE: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_NO_CAPACITY: _ClassVar[HandoffOutcome]
    HANDOFF_OUTCOME_BACKEND_FAILED: _ClassVar[HandoffOutcome]
TRANSFER_MODE_UNSPECIFIED: TransferMode
TRANSFER_MODE_READ: TransferMode
TRANSFER_MODE_SERVE: TransferMode
DIGEST_KIND_UNSPECIFIED: DigestKind
DIGEST_KIND_OFF: DigestKind
DIGEST_KIND_WSUM64: DigestKind
DIGEST_KIND_CRC32: DigestKind
HANDOFF_OUTCOME_UNSPECIFIED: HandoffOutcome
HANDOFF_OUTCOME_OK: HandoffOutcome
HANDOFF_OUTCOME_STALE_LEASE: HandoffOutcome
HANDOFF_OUTCOME_DIGEST_MISMATCH: HandoffOutcome
HANDOFF_OUTCOME_PEER_LOST: HandoffOutcome
HANDOFF_OUTCOME_STALLED: HandoffOutcome
HANDOFF_OUTCOME_ABORTED: HandoffOutcome
HANDOFF_OUTCOME_INCOMPATIBLE: HandoffOutcome
HANDOFF_OUTCOME_NO_CAPACITY: HandoffOutcome
HANDOFF_OUTCOME_BACKEND_FAILED: HandoffOutcome

class KVFormat(_message.Message):
    __slots__ = ("model_digest", "tokenizer_digest", "template_digest", "compute_dtype", "kv_dtype", "quantisation", "num_layers", "num_kv_heads", "head_dim", "protocol")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    tokenizer_digest: str
    template_digest: str
    compute_dtype: str
    kv_dtype: str
    quantisation: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    protocol: int
    def __init__(self, model_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., quantisation: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class KVGeometry(_message.Message):
    __slots__ = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "dtype_bytes", "rank", "num_ranks", "order", "first_layer")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    rank: int
    num_ranks: int
    order: str
    first_layer: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype_bytes: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., order: _Optional[str] = ..., first_layer: _Optional[int] = ...) -> None: ...

class AdvertisedRegion(_message.Message):
    __slots__ = ("name", "address", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class LinkInfo(_message.Message):
    __slots__ = ("backend", "agent_name", "metadata", "regions", "mode")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    backend: str
    agent_name: str
    metadata: bytes
    regions: _containers.RepeatedCompositeFieldContainer[AdvertisedRegion]
    mode: TransferMode
    def __init__(self, backend: _Optional[str] = ..., agent_name: _Optional[str] = ..., metadata: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[AdvertisedRegion, _Mapping]]] = ..., mode: _Optional[_Union[TransferMode, str]] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "format", "geometry", "link", "other_links", "canary_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    OTHER_LINKS_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    format: KVFormat
    geometry: KVGeometry
    link: LinkInfo
    other_links: _containers.RepeatedCompositeFieldContainer[LinkInfo]
    canary_digest: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., format: _Optional[_Union[KVFormat, _Mapping]] = ..., geometry: _Optional[_Union[KVGeometry, _Mapping]] = ..., link: _Optional[_Union[LinkInfo, _Mapping]] = ..., other_links: _Optional[_Iterable[_Union[LinkInfo, _Mapping]]] = ..., canary_digest: _Optional[bytes] = ...) -> None: ...

class LinkMeasure(_message.Message):
    __slots__ = ("backend", "mode", "lane", "is_used", "connect_s", "latency_s", "bytes_per_s", "memcpy_bytes_per_s", "slug", "message")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    IS_USED_FIELD_NUMBER: _ClassVar[int]
    CONNECT_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMCPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SLUG_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    backend: str
    mode: TransferMode
    lane: str
    is_used: bool
    connect_s: float
    latency_s: float
    bytes_per_s: float
    memcpy_bytes_per_s: float
    slug: str
    message: str
    def __init__(self, backend: _Optional[str] = ..., mode: _Optional[_Union[TransferMode, str]] = ..., lane: _Optional[str] = ..., is_used: _Optional[bool] = ..., connect_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., memcpy_bytes_per_s: _Optional[float] = ..., slug: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PairCheck(_message.Message):
    __slots__ = ("prefill", "decode", "circuit", "circuit_why", "reason", "links")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_WHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    circuit: str
    circuit_why: str
    reason: str
    links: _containers.RepeatedCompositeFieldContainer[LinkMeasure]
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., circuit: _Optional[str] = ..., circuit_why: _Optional[str] = ..., reason: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkMeasure, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "ticket")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    peer: PeerInfo
    ticket: bytes
    def __init__(self, peer: _Optional[_Union[PeerInfo, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("peer", "lease_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    peer: PeerInfo
    lease_s: float
    def __init__(self, peer: _Optional[_Union[PeerInfo, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class LeaseRef(_message.Message):
    __slots__ = ("lease_id", "epoch")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    epoch: int
    def __init__(self, lease_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("handoff_id", "request_id", "attempt", "num_held_blocks", "ticket", "traceparent")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    request_id: str
    attempt: int
    num_held_blocks: int
    ticket: bytes
    traceparent: str
    def __init__(self, handoff_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., ticket: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("handoff_id", "request_id", "attempt", "num_held_blocks", "ticket", "traceparent")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    request_id: str
    attempt: int
    num_held_blocks: int
    ticket: bytes
    traceparent: str
    def __init__(self, handoff_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., ticket: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("handoff_id", "lease", "slot", "first_block", "block_ids", "attempt", "traceparent")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    lease: LeaseRef
    slot: int
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    traceparent: str
    def __init__(self, handoff_id: _Optional[str] = ..., lease: _Optional[_Union[LeaseRef, _Mapping]] = ..., slot: _Optional[int] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease", "slot", "block_ids", "first_block", "num_tokens", "digest", "digests")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseRef
    slot: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    num_tokens: int
    digest: DigestKind
    digests: bytes
    def __init__(self, lease: _Optional[_Union[LeaseRef, _Mapping]] = ..., slot: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[_Union[DigestKind, str]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("handoff_id", "grant", "first_tokens", "attempt", "traceparent")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    grant: Grant
    first_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.FirstToken]
    attempt: int
    traceparent: str
    def __init__(self, handoff_id: _Optional[str] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[_common_pb2.FirstToken, _Mapping]]] = ..., attempt: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handoff_id", "attempt", "slug", "message")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLUG_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    attempt: int
    slug: str
    message: str
    def __init__(self, handoff_id: _Optional[str] = ..., attempt: _Optional[int] = ..., slug: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("handoff_id", "lease", "attempt", "outcome", "num_bytes")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    lease: LeaseRef
    attempt: int
    outcome: HandoffOutcome
    num_bytes: int
    def __init__(self, handoff_id: _Optional[str] = ..., lease: _Optional[_Union[LeaseRef, _Mapping]] = ..., attempt: _Optional[int] = ..., outcome: _Optional[_Union[HandoffOutcome, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class AbortHandoff(_message.Message):
    __slots__ = ("handoff_id", "attempt", "reason", "outcome")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    attempt: int
    reason: str
    outcome: HandoffOutcome
    def __init__(self, handoff_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., outcome: _Optional[_Union[HandoffOutcome, str]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("handoff_id", "lease", "slug", "message", "attempt")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLUG_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    lease: LeaseRef
    slug: str
    message: str
    attempt: int
    def __init__(self, handoff_id: _Optional[str] = ..., lease: _Optional[_Union[LeaseRef, _Mapping]] = ..., slug: _Optional[str] = ..., message: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class CanaryRead(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class ToHolder(_message.Message):
    __slots__ = ("hello", "open", "claim", "renew", "release", "abort", "canary")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    claim: Claim
    renew: Renew
    release: Release
    abort: AbortHandoff
    canary: CanaryRead
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., abort: _Optional[_Union[AbortHandoff, _Mapping]] = ..., canary: _Optional[_Union[CanaryRead, _Mapping]] = ...) -> None: ...

class ToReader(_message.Message):
    __slots__ = ("welcome", "ready", "sealed", "refused", "ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ready: Ready
    sealed: Sealed
    refused: Refused
    ended: Ended
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...
