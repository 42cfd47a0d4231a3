from rpc.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request", "handoff_id", "worker_incarnation", "decode")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerateRequest
    handoff_id: str
    worker_incarnation: int
    decode: _common_pb2.WorkerAddress
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerateRequest, _Mapping]] = ..., handoff_id: _Optional[str] = ..., worker_incarnation: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.WorkerAddress, _Mapping]] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("first_tokens", "num_cached_tokens", "stages", "prompt_logprobs")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.FirstToken]
    num_cached_tokens: int
    stages: _common_pb2.StageTimes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[_common_pb2.FirstToken, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., stages: _Optional[_Union[_common_pb2.StageTimes, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...
