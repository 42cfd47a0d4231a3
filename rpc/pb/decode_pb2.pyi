from rpc.pb import common_pb2 as _common_pb2
from rpc.pb import handoff_pb2 as _handoff_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmitVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMIT_VERDICT_UNSPECIFIED: _ClassVar[AdmitVerdict]
    ADMIT_VERDICT_ACCEPTED: _ClassVar[AdmitVerdict]
    ADMIT_VERDICT_QUEUED: _ClassVar[AdmitVerdict]
ADMIT_VERDICT_UNSPECIFIED: AdmitVerdict
ADMIT_VERDICT_ACCEPTED: AdmitVerdict
ADMIT_VERDICT_QUEUED: AdmitVerdict

class PairCheckRequest(_message.Message):
    __slots__ = ("worker_incarnation", "prefill")
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    worker_incarnation: int
    prefill: _common_pb2.WorkerAddress
    def __init__(self, worker_incarnation: _Optional[int] = ..., prefill: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("request", "handoff_id", "mode", "worker_incarnation", "prefill", "ticket", "stream_key", "is_held")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STREAM_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerateRequest
    handoff_id: str
    mode: _common_pb2.Mode
    worker_incarnation: int
    prefill: _common_pb2.WorkerAddress
    ticket: bytes
    stream_key: int
    is_held: bool
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerateRequest, _Mapping]] = ..., handoff_id: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.Mode, str]] = ..., worker_incarnation: _Optional[int] = ..., prefill: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ..., ticket: _Optional[bytes] = ..., stream_key: _Optional[int] = ..., is_held: _Optional[bool] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ("verdict", "num_ahead")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    verdict: AdmitVerdict
    num_ahead: int
    def __init__(self, verdict: _Optional[_Union[AdmitVerdict, str]] = ..., num_ahead: _Optional[int] = ...) -> None: ...

class OutputsRequest(_message.Message):
    __slots__ = ("gateway_id", "gateway_incarnation", "worker_incarnation")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_incarnation: int
    worker_incarnation: int
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., worker_incarnation: _Optional[int] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("request_id", "choice", "attempt", "first_index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "stages", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    stages: _common_pb2.StageTimes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stages: _Optional[_Union[_common_pb2.StageTimes, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class AttemptFailed(_message.Message):
    __slots__ = ("request_id", "attempt", "slug", "message", "worker_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLUG_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    slug: str
    message: str
    worker_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., slug: _Optional[str] = ..., message: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class AttemptAccepted(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class PlainTokens(_message.Message):
    __slots__ = ("keys", "indexes", "token_ids")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("age_s", "chunks", "failed", "accepted", "plain")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    chunks: _containers.RepeatedCompositeFieldContainer[TokenChunk]
    failed: _containers.RepeatedCompositeFieldContainer[AttemptFailed]
    accepted: _containers.RepeatedCompositeFieldContainer[AttemptAccepted]
    plain: PlainTokens
    def __init__(self, age_s: _Optional[float] = ..., chunks: _Optional[_Iterable[_Union[TokenChunk, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[AttemptFailed, _Mapping]]] = ..., accepted: _Optional[_Iterable[_Union[AttemptAccepted, _Mapping]]] = ..., plain: _Optional[_Union[PlainTokens, _Mapping]] = ...) -> None: ...
