from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SPLIT: _ClassVar[Mode]
    MODE_LOCAL: _ClassVar[Mode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_UNIFIED: Role
MODE_UNSPECIFIED: Mode
MODE_SPLIT: Mode
MODE_LOCAL: Mode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "n", "max_tokens", "min_tokens", "ignore_eos", "eos_token_ids", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenList]
    logprobs: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class ChoiceProgress(_message.Message):
    __slots__ = ("choice", "accepted")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt_token_ids", "sampling", "choices", "attempt", "gateway_id", "gateway_incarnation", "deadline_s", "age_s", "priority", "tenant", "cache_salt", "workload_class", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_CLASS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceProgress]
    attempt: int
    gateway_id: str
    gateway_incarnation: int
    deadline_s: float
    age_s: float
    priority: int
    tenant: str
    cache_salt: str
    workload_class: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[ChoiceProgress, _Mapping]]] = ..., attempt: _Optional[int] = ..., gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., deadline_s: _Optional[float] = ..., age_s: _Optional[float] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., workload_class: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TokenScore(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TokenScore]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TokenScore, _Mapping]]] = ...) -> None: ...

class TransferChunk(_message.Message):
    __slots__ = ("attempt", "start_s", "duration_s", "num_bytes", "first_block", "num_blocks", "num_descriptors", "is_early")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    start_s: float
    duration_s: float
    num_bytes: int
    first_block: int
    num_blocks: int
    num_descriptors: int
    is_early: bool
    def __init__(self, attempt: _Optional[int] = ..., start_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_bytes: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_descriptors: _Optional[int] = ..., is_early: _Optional[bool] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("prefill_queue_s", "prefill_s", "handoff_wait_s", "reservation_s", "transfer_s", "decode_queue_s", "decode_s", "transfer_bytes", "transfer_backend", "num_prompt_tokens_computed", "num_cached_tokens", "transfer_early_bytes", "transfer_wait_s", "transfer_post_s", "transfer_move_s", "transfer_verify_s", "transfer_publish_s", "delivery_s", "transfer_mode", "transfer_chunks")
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_POST_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MOVE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PUBLISH_S_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MODE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    prefill_queue_s: float
    prefill_s: float
    handoff_wait_s: float
    reservation_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    transfer_bytes: int
    transfer_backend: str
    num_prompt_tokens_computed: int
    num_cached_tokens: int
    transfer_early_bytes: int
    transfer_wait_s: float
    transfer_post_s: float
    transfer_move_s: float
    transfer_verify_s: float
    transfer_publish_s: float
    delivery_s: float
    transfer_mode: str
    transfer_chunks: _containers.RepeatedCompositeFieldContainer[TransferChunk]
    def __init__(self, prefill_queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., handoff_wait_s: _Optional[float] = ..., reservation_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., num_prompt_tokens_computed: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., transfer_early_bytes: _Optional[int] = ..., transfer_wait_s: _Optional[float] = ..., transfer_post_s: _Optional[float] = ..., transfer_move_s: _Optional[float] = ..., transfer_verify_s: _Optional[float] = ..., transfer_publish_s: _Optional[float] = ..., delivery_s: _Optional[float] = ..., transfer_mode: _Optional[str] = ..., transfer_chunks: _Optional[_Iterable[_Union[TransferChunk, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "index", "token_id", "logprobs", "finish_reason", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    token_id: int
    logprobs: TokenLogprobs
    finish_reason: FinishReason
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class WorkerAddress(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reason", "choices", "is_resumed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    is_resumed: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ..., is_resumed: _Optional[bool] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found", "num_custody_blocks")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_CUSTODY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    num_custody_blocks: int
    def __init__(self, found: _Optional[bool] = ..., num_custody_blocks: _Optional[int] = ...) -> None: ...
