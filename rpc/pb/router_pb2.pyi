from rpc.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]

class CommandKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMAND_KIND_UNSPECIFIED: _ClassVar[CommandKind]
    COMMAND_KIND_DRAIN: _ClassVar[CommandKind]
    COMMAND_KIND_REREGISTER: _ClassVar[CommandKind]
    COMMAND_KIND_JOINED: _ClassVar[CommandKind]
    COMMAND_KIND_FLIP: _ClassVar[CommandKind]
    COMMAND_KIND_PEERS: _ClassVar[CommandKind]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_LOST: WorkerState
COMMAND_KIND_UNSPECIFIED: CommandKind
COMMAND_KIND_DRAIN: CommandKind
COMMAND_KIND_REREGISTER: CommandKind
COMMAND_KIND_JOINED: CommandKind
COMMAND_KIND_FLIP: CommandKind
COMMAND_KIND_PEERS: CommandKind

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class WorkerPair(_message.Message):
    __slots__ = ("prefill", "prefill_incarnation", "decode", "decode_incarnation")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    prefill_incarnation: int
    decode: str
    decode_incarnation: int
    def __init__(self, prefill: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., decode: _Optional[str] = ..., decode_incarnation: _Optional[int] = ...) -> None: ...

class HeldHandoff(_message.Message):
    __slots__ = ("handoff_id", "holder")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    holder: _common_pb2.WorkerAddress
    def __init__(self, handoff_id: _Optional[str] = ..., holder: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "model", "attempt", "num_prompt_tokens", "max_new_tokens", "block_hashes", "gateway_id", "gateway_incarnation", "deadline_s", "age_s", "priority", "tenant", "excluded_workers", "excluded_pairs", "traceparent", "held", "ended")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    attempt: int
    num_prompt_tokens: int
    max_new_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    gateway_id: str
    gateway_incarnation: int
    deadline_s: float
    age_s: float
    priority: int
    tenant: str
    excluded_workers: _containers.RepeatedCompositeFieldContainer[WorkerRef]
    excluded_pairs: _containers.RepeatedCompositeFieldContainer[WorkerPair]
    traceparent: str
    held: HeldHandoff
    ended: _containers.RepeatedCompositeFieldContainer[PlacementEnd]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., attempt: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., deadline_s: _Optional[float] = ..., age_s: _Optional[float] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., excluded_workers: _Optional[_Iterable[_Union[WorkerRef, _Mapping]]] = ..., excluded_pairs: _Optional[_Iterable[_Union[WorkerPair, _Mapping]]] = ..., traceparent: _Optional[str] = ..., held: _Optional[_Union[HeldHandoff, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[PlacementEnd, _Mapping]]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("prefill_wait_s", "prefill_s", "transfer_s", "ttft_s", "num_cached_tokens", "num_kept_tokens", "cost_s", "itl_harm_s")
    PREFILL_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    ITL_HARM_S_FIELD_NUMBER: _ClassVar[int]
    prefill_wait_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    num_cached_tokens: int
    num_kept_tokens: int
    cost_s: float
    itl_harm_s: float
    def __init__(self, prefill_wait_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_kept_tokens: _Optional[int] = ..., cost_s: _Optional[float] = ..., itl_harm_s: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("placement_id", "handoff_id", "mode", "decode", "prefill", "prediction", "runner_up", "reason", "ticket", "queue_s", "is_held", "runner_up_prediction")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_PREDICTION_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    handoff_id: str
    mode: _common_pb2.Mode
    decode: _common_pb2.WorkerAddress
    prefill: _common_pb2.WorkerAddress
    prediction: Prediction
    runner_up: str
    reason: str
    ticket: bytes
    queue_s: float
    is_held: bool
    runner_up_prediction: Prediction
    def __init__(self, placement_id: _Optional[str] = ..., handoff_id: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.Mode, str]] = ..., decode: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., runner_up: _Optional[str] = ..., reason: _Optional[str] = ..., ticket: _Optional[bytes] = ..., queue_s: _Optional[float] = ..., is_held: _Optional[bool] = ..., runner_up_prediction: _Optional[_Union[Prediction, _Mapping]] = ...) -> None: ...

class PlacementEnd(_message.Message):
    __slots__ = ("placement_id", "request_id", "attempt", "outcome", "blamed_worker", "num_generated")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BLAMED_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    request_id: str
    attempt: int
    outcome: str
    blamed_worker: str
    num_generated: int
    def __init__(self, placement_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., outcome: _Optional[str] = ..., blamed_worker: _Optional[str] = ..., num_generated: _Optional[int] = ...) -> None: ...

class ModelRecord(_message.Message):
    __slots__ = ("name", "format_hash", "block_size", "max_context", "vocab_size", "execution")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    format_hash: str
    block_size: int
    max_context: int
    vocab_size: int
    execution: str
    def __init__(self, name: _Optional[str] = ..., format_hash: _Optional[str] = ..., block_size: _Optional[int] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., execution: _Optional[str] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class WorkerRegistration(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "model", "revision", "address", "http_address", "pid", "hostname", "labels", "num_blocks", "block_bytes", "max_sequences", "max_step_tokens", "transfer_backend", "max_mixed_tokens", "is_caching")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    MAX_MIXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_CACHING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: _common_pb2.Role
    model: ModelRecord
    revision: str
    address: str
    http_address: str
    pid: int
    hostname: str
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    num_blocks: int
    block_bytes: int
    max_sequences: int
    max_step_tokens: int
    transfer_backend: str
    max_mixed_tokens: int
    is_caching: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., model: _Optional[_Union[ModelRecord, _Mapping]] = ..., revision: _Optional[str] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., pid: _Optional[int] = ..., hostname: _Optional[str] = ..., labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., max_mixed_tokens: _Optional[int] = ..., is_caching: _Optional[bool] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "custody", "in_use", "leased", "cached", "free", "reserved")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CUSTODY_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    total: int
    custody: int
    in_use: int
    leased: int
    cached: int
    free: int
    reserved: int
    def __init__(self, total: _Optional[int] = ..., custody: _Optional[int] = ..., in_use: _Optional[int] = ..., leased: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ...) -> None: ...

class BackendBytes(_message.Message):
    __slots__ = ("backend", "num_bytes")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    backend: str
    num_bytes: int
    def __init__(self, backend: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class StepWork(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_prompt_pairs", "num_decode_rows", "num_decode_positions")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_prompt_pairs: int
    num_decode_rows: int
    num_decode_positions: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_prompt_pairs: _Optional[int] = ..., num_decode_rows: _Optional[int] = ..., num_decode_positions: _Optional[int] = ...) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("work", "seconds")
    WORK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    work: StepWork
    seconds: float
    def __init__(self, work: _Optional[_Union[StepWork, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class HandoffSample(_message.Message):
    __slots__ = ("prefill", "num_bytes", "seconds")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    prefill: WorkerRef
    num_bytes: int
    seconds: float
    def __init__(self, prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CostSamples(_message.Message):
    __slots__ = ("steps", "handoffs")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepSample]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffSample]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepSample, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[HandoffSample, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("state", "num_running", "num_waiting", "queued_prompt_tokens", "blocks", "num_leases", "held_bytes", "num_transfers", "kv_bytes_received", "kv_bytes_sent", "prompt_tokens_computed", "tokens_generated", "num_steps", "busy_s", "stored_hashes", "evicted_hashes", "broken_pairs", "prompt_tokens_refetched", "samples", "next_role", "drain_left_s", "pairs")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    STORED_HASHES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_HASHES_FIELD_NUMBER: _ClassVar[int]
    BROKEN_PAIRS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_REFETCHED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    blocks: BlockCounts
    num_leases: int
    held_bytes: int
    num_transfers: int
    kv_bytes_received: _containers.RepeatedCompositeFieldContainer[BackendBytes]
    kv_bytes_sent: _containers.RepeatedCompositeFieldContainer[BackendBytes]
    prompt_tokens_computed: int
    tokens_generated: int
    num_steps: int
    busy_s: float
    stored_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    evicted_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    broken_pairs: _containers.RepeatedCompositeFieldContainer[WorkerRef]
    prompt_tokens_refetched: int
    samples: CostSamples
    next_role: _common_pb2.Role
    drain_left_s: float
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., num_leases: _Optional[int] = ..., held_bytes: _Optional[int] = ..., num_transfers: _Optional[int] = ..., kv_bytes_received: _Optional[_Iterable[_Union[BackendBytes, _Mapping]]] = ..., kv_bytes_sent: _Optional[_Iterable[_Union[BackendBytes, _Mapping]]] = ..., prompt_tokens_computed: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., num_steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., stored_hashes: _Optional[_Iterable[bytes]] = ..., evicted_hashes: _Optional[_Iterable[bytes]] = ..., broken_pairs: _Optional[_Iterable[_Union[WorkerRef, _Mapping]]] = ..., prompt_tokens_refetched: _Optional[int] = ..., samples: _Optional[_Union[CostSamples, _Mapping]] = ..., next_role: _Optional[_Union[_common_pb2.Role, str]] = ..., drain_left_s: _Optional[float] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("registration", "load")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    registration: WorkerRegistration
    load: WorkerLoad
    def __init__(self, registration: _Optional[_Union[WorkerRegistration, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class TicketKey(_message.Message):
    __slots__ = ("secret", "age_s")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    age_s: float
    def __init__(self, secret: _Optional[bytes] = ..., age_s: _Optional[float] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("kind", "reason", "role", "peers", "tickets", "ticket_key")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    kind: CommandKind
    reason: str
    role: _common_pb2.Role
    peers: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerAddress]
    tickets: _containers.RepeatedScalarFieldContainer[bytes]
    ticket_key: TicketKey
    def __init__(self, kind: _Optional[_Union[CommandKind, str]] = ..., reason: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., peers: _Optional[_Iterable[_Union[_common_pb2.WorkerAddress, _Mapping]]] = ..., tickets: _Optional[_Iterable[bytes]] = ..., ticket_key: _Optional[_Union[TicketKey, _Mapping]] = ...) -> None: ...

class RequestStage(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class AttemptRecord(_message.Message):
    __slots__ = ("attempt", "started_s", "duration_s", "num_choices", "outcome", "message", "placement")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    started_s: float
    duration_s: float
    num_choices: int
    outcome: str
    message: str
    placement: Placement
    def __init__(self, attempt: _Optional[int] = ..., started_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_choices: _Optional[int] = ..., outcome: _Optional[str] = ..., message: _Optional[str] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class StageInterval(_message.Message):
    __slots__ = ("stage", "start_s", "duration_s", "attempt", "worker")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    stage: str
    start_s: float
    duration_s: float
    attempt: int
    worker: str
    def __init__(self, stage: _Optional[str] = ..., start_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., attempt: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "model", "outcome", "num_prompt_tokens", "num_completion_tokens", "num_cached_tokens", "attempts", "mode", "prefill_worker", "decode_worker", "reason", "stages", "ttft_s", "duration_s", "traceparent", "transfer_bytes", "transfer_backend", "history", "timeline", "times", "workload_class", "age_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_CLASS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    outcome: str
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    attempts: int
    mode: str
    prefill_worker: str
    decode_worker: str
    reason: str
    stages: _containers.RepeatedCompositeFieldContainer[RequestStage]
    ttft_s: float
    duration_s: float
    traceparent: str
    transfer_bytes: int
    transfer_backend: str
    history: _containers.RepeatedCompositeFieldContainer[AttemptRecord]
    timeline: _containers.RepeatedCompositeFieldContainer[StageInterval]
    times: _common_pb2.StageTimes
    workload_class: str
    age_s: float
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., outcome: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., mode: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., reason: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[RequestStage, _Mapping]]] = ..., ttft_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., transfer_bytes: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., history: _Optional[_Iterable[_Union[AttemptRecord, _Mapping]]] = ..., timeline: _Optional[_Iterable[_Union[StageInterval, _Mapping]]] = ..., times: _Optional[_Union[_common_pb2.StageTimes, _Mapping]] = ..., workload_class: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class RequestRecords(_message.Message):
    __slots__ = ("records", "num_kept", "max_kept", "oldest_age_s")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    MAX_KEPT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    num_kept: int
    max_kept: int
    oldest_age_s: float
    def __init__(self, records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ..., num_kept: _Optional[int] = ..., max_kept: _Optional[int] = ..., oldest_age_s: _Optional[float] = ...) -> None: ...

class RecordQuery(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GatewayReport(_message.Message):
    __slots__ = ("gateway_id", "incarnation", "http_address", "pid", "num_requests", "records")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: int
    http_address: str
    pid: int
    num_requests: int
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., http_address: _Optional[str] = ..., pid: _Optional[int] = ..., num_requests: _Optional[int] = ..., records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ...) -> None: ...

class ModelPath(_message.Message):
    __slots__ = ("model", "is_usable", "reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_USABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    is_usable: bool
    reason: str
    def __init__(self, model: _Optional[str] = ..., is_usable: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("models", "usable")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelRecord]
    usable: _containers.RepeatedCompositeFieldContainer[ModelPath]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelRecord, _Mapping]]] = ..., usable: _Optional[_Iterable[_Union[ModelPath, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("registration", "load", "state", "heartbeat_age_s", "next_role")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    registration: WorkerRegistration
    load: WorkerLoad
    state: WorkerState
    heartbeat_age_s: float
    next_role: _common_pb2.Role
    def __init__(self, registration: _Optional[_Union[WorkerRegistration, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., heartbeat_age_s: _Optional[float] = ..., next_role: _Optional[_Union[_common_pb2.Role, str]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("model", "role", "desired", "ready", "problem")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _common_pb2.Role
    desired: int
    ready: int
    problem: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., desired: _Optional[int] = ..., ready: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "incarnation", "http_address", "pid", "num_requests", "heartbeat_age_s")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: int
    http_address: str
    pid: int
    num_requests: int
    heartbeat_age_s: float
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., http_address: _Optional[str] = ..., pid: _Optional[int] = ..., num_requests: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("router_incarnation", "router_pid", "router_http_address", "pools", "workers", "gateways", "models", "num_placements", "num_waiting", "scaling", "rollouts")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_PID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    router_pid: int
    router_http_address: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    models: _containers.RepeatedCompositeFieldContainer[ModelRecord]
    num_placements: int
    num_waiting: int
    scaling: _containers.RepeatedCompositeFieldContainer[ScalingStatus]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, router_incarnation: _Optional[int] = ..., router_pid: _Optional[int] = ..., router_http_address: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelRecord, _Mapping]]] = ..., num_placements: _Optional[int] = ..., num_waiting: _Optional[int] = ..., scaling: _Optional[_Iterable[_Union[ScalingStatus, _Mapping]]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("model", "revision", "section", "age_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    section: str
    age_s: float
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., section: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("model", "role", "replicas", "age_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _common_pb2.Role
    replicas: int
    age_s: float
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., replicas: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class PoolNeed(_message.Message):
    __slots__ = ("role", "num_workers")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    num_workers: float
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., num_workers: _Optional[float] = ...) -> None: ...

class ScalingStatus(_message.Message):
    __slots__ = ("model", "mode", "action", "reason", "targets", "needs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    mode: str
    action: str
    reason: str
    targets: _containers.RepeatedCompositeFieldContainer[PoolSize]
    needs: _containers.RepeatedCompositeFieldContainer[PoolNeed]
    def __init__(self, model: _Optional[str] = ..., mode: _Optional[str] = ..., action: _Optional[str] = ..., reason: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ..., needs: _Optional[_Iterable[_Union[PoolNeed, _Mapping]]] = ...) -> None: ...

class PoolProblem(_message.Message):
    __slots__ = ("model", "role", "message")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _common_pb2.Role
    message: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., message: _Optional[str] = ...) -> None: ...

class LauncherReport(_message.Message):
    __slots__ = ("pools", "problems", "rollouts")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    problems: _containers.RepeatedCompositeFieldContainer[PoolProblem]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[PoolProblem, _Mapping]]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class PoolSizes(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("prefill", "prefill_incarnation", "decode", "backend", "mode", "lane", "bytes_per_s", "memcpy_bytes_per_s", "circuit", "why", "num_bytes", "busy_s", "num_handoffs", "num_failures")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMCPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    prefill_incarnation: int
    decode: str
    backend: str
    mode: str
    lane: str
    bytes_per_s: float
    memcpy_bytes_per_s: float
    circuit: str
    why: str
    num_bytes: int
    busy_s: float
    num_handoffs: int
    num_failures: int
    def __init__(self, prefill: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., decode: _Optional[str] = ..., backend: _Optional[str] = ..., mode: _Optional[str] = ..., lane: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., memcpy_bytes_per_s: _Optional[float] = ..., circuit: _Optional[str] = ..., why: _Optional[str] = ..., num_bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., num_handoffs: _Optional[int] = ..., num_failures: _Optional[int] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("number", "kind", "subject", "text", "age_s", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    subject: str
    text: str
    age_s: float
    count: int
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ..., age_s: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class ClusterSample(_message.Message):
    __slots__ = ("age_s", "duration_s", "num_running", "num_waiting", "prompt_tokens_per_s", "tokens_per_s", "kv_bytes_per_s", "num_ended", "num_failed", "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P50_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_S_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    duration_s: float
    num_running: int
    num_waiting: int
    prompt_tokens_per_s: float
    tokens_per_s: float
    kv_bytes_per_s: float
    num_ended: int
    num_failed: int
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    def __init__(self, age_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., kv_bytes_per_s: _Optional[float] = ..., num_ended: _Optional[int] = ..., num_failed: _Optional[int] = ..., ttft_p50_s: _Optional[float] = ..., ttft_p95_s: _Optional[float] = ..., itl_p50_s: _Optional[float] = ..., itl_p95_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class ClusterNews(_message.Message):
    __slots__ = ("status", "pairs", "events", "records", "samples")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    status: ClusterStatus
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    samples: _containers.RepeatedCompositeFieldContainer[ClusterSample]
    def __init__(self, status: _Optional[_Union[ClusterStatus, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[ClusterSample, _Mapping]]] = ...) -> None: ...
