"""The shared vocabulary of a request: what is asked, where it runs, what comes back.

All facts are frozen; progress lives in the one class of each process that owns it. Durations are seconds.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from core.costs import StepWork
from core.ids import BlockHash, GatewayId, HandoffId, Incarnation, PlacementId, RequestId, WorkerId
from core.kv import BlockCounts


class Role(StrEnum):
    """What a worker's pool is for. ``unified`` is a decode worker that always prefills locally."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class Mode(StrEnum):
    """How a request is placed: ``split`` (P reads the prompt, D answers) or ``local`` (D does both)."""

    SPLIT = "split"
    LOCAL = "local"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class WorkerState(StrEnum):
    """As the worker says (starting, ready, draining) or as the router judges (suspect, lost)."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    LOST = "lost"


class Stage(StrEnum):
    """Where a request's time goes. In the order in which a request passes them; of the last three there is none in a
    life without trouble and without a network."""

    ADMISSION = "admission"
    """Body, key and limits."""
    TOKENIZE = "tokenize"
    """Parsing, template and tokens."""
    ROUTE_QUEUE = "route_queue"
    """Waiting at the router until a worker has room."""
    ROUTE = "route"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    HANDOFF_WAIT = "handoff_wait"
    """The first token is there, and the decode worker has no room yet."""
    TRANSFER = "transfer"
    """From the grant until the blocks are verified and can be used: what the prefill did not hide."""
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    DELIVERY = "delivery"
    """From the step that made the last token until the answer was handed to the socket, way to the gateway excepted."""
    NETWORK = "network"
    """Between processes: the only stage that is a difference."""
    RETRY = "retry"
    """Of an attempt that failed, what it had not finished."""
    LOST = "lost"
    """The same of a request that failed or was cancelled."""


class ExecutionKind(StrEnum):
    """What a worker's steps are."""

    REAL = "real"
    MOCK = "mock"
    """No model runs: steps take as long as a table says, answers are made up."""


# -- the request ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a choice ends. Neutral values mean "off"; validated at the gateway."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    """Always set: the gateway draws one when the caller gives none."""
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    """Of the model; off with ``ignore_eos``, held down until ``min_tokens``."""
    stop_token_ids: tuple[int, ...] = ()
    """Of the caller; held down until ``min_tokens``."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty is "all"."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    """None: no log probabilities. k: those of the chosen token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    grammar: str = ""
    """A compiled-grammar source; empty is none."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """What the gateway has accepted of one choice so far (not empty only in a retry).

    The choices of one attempt share their prompt, so they have accepted the same: nothing, as a rule. Choices that have
    come apart resume separately, each by an attempt (with a number) of its own.
    """

    choice: int = 0
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What the user asked, parsed once. A retry is the same request with ``attempt + 1`` and the accepted tokens.

    ``prompt_token_ids`` stays the original prompt: penalties, min and max tokens and usage count from its end.
    """

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[ChoiceProgress, ...] = (ChoiceProgress(),)
    attempt: int = 1
    gateway_id: GatewayId
    gateway_incarnation: Incarnation
    deadline_s: float
    """Seconds left from now. A duration, never a point in time: it is re-anchored by each receiver."""
    age_s: float = 0.0
    """Seconds since the gateway received the request: what a refused request carries to its next place."""
    priority: int = 0
    """Lower is served first."""
    tenant: str = ""
    cache_salt: str = ""
    """From the authenticated tenant; part of the block hashes."""
    workload_class: str = ""
    traceparent: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


# -- what comes back --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one generated token, from raw scores. ``top`` is (token id, logprob), most likely first."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Some consecutive tokens of one choice of one attempt.

    ``first_index`` counts generated tokens of the choice from the end of the original prompt. Duplicates and old
    attempts are dropped by the reader; a gap is an error.
    """

    request_id: RequestId
    choice: int
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or one for each token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on. Given once, with the first token of a worker that read the prompt."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the choice, when ``finish_reason`` is ``stop``."""
    stages: "StageTimes | None" = None
    """With the first chunk of the first choice: as known then. With the chunk that ends the choice: whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferChunk:
    """KV of one hand-off that moved as one operation, as the decode worker saw it."""

    attempt: int
    start_s: float
    """Since the gateway received the request, by the age that came with it: its way to the worker is not counted."""
    duration_s: float
    """Until the last byte was there."""
    num_bytes: int
    first_block: int
    """Within the sequence."""
    num_blocks: int
    num_descriptors: int
    is_early: bool
    """Posted while the prompt was still computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that a request spent at workers, measured there as durations. Zero where a stage was not passed."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_wait_s: float = 0.0
    """D: from admission until the grant was there."""
    reservation_s: float = 0.0
    """D: waiting for room."""
    transfer_s: float = 0.0
    """D: from the grant to validated blocks. The next five are its parts and sum to it."""
    transfer_wait_s: float = 0.0
    """Until the transfer thread was at it."""
    transfer_post_s: float = 0.0
    """In calls that post operations; between processes of one machine that *is* the copy."""
    transfer_move_s: float = 0.0
    """Until the last byte was there."""
    transfer_verify_s: float = 0.0
    """The lease slot, and the digests that were not made yet."""
    transfer_publish_s: float = 0.0
    """Until the sequences that have the blocks could run."""
    decode_queue_s: float = 0.0
    """D: from runnable to the first step that ran it."""
    decode_s: float = 0.0
    transfer_bytes: int = 0
    transfer_early_bytes: int = 0
    """Of those, what had arrived when the grant was there."""
    transfer_backend: str = ""
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    delivery_s: float = 0.0
    """D: from the end of the step that ended the choice until its outputs were sent."""
    transfer_mode: str = ""
    """Who moved the bytes: ``read`` or ``serve``."""
    transfer_chunks: tuple[TransferChunk, ...] = ()
    """In the order of their begin; of very many the last ones are counted as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An admitted attempt ended at the worker by a typed error."""

    request_id: RequestId
    attempt: int
    slug: str
    message: str
    worker_id: WorkerId | None = None
    """The worker to blame, if it is not the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAccepted:
    """A queued admission now has its reservation."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTokens:
    """Tokens that are nothing but tokens, by columns: most of a step, at a fraction of the cost of chunks.

    A key stands for (request, attempt, choice): ``AdmitRequest.stream_key`` plus the number of the choice. Otherwise an
    entry is a chunk of one token.
    """

    keys: tuple[int, ...] = ()
    indexes: tuple[int, ...] = ()
    """As ``TokenChunk.first_index``."""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """One message for one step: everything that a decode worker has for one gateway. Plain tokens precede chunks."""

    age_s: float = 0.0
    """Seconds between the end of the step and the moment this message was sent."""
    plain: PlainTokens | None = None
    chunks: tuple[TokenChunk, ...] = ()
    failed: tuple[AttemptFailed, ...] = ()
    accepted: tuple[AttemptAccepted, ...] = ()


# -- placing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where one incarnation of a worker is reached. ``address`` is ``host:port`` of its gRPC server."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHandoff:
    """KV of a prompt, computed or under computation at ``holder``. The decode worker it was for has failed: another can
    claim it."""

    handoff_id: HandoffId
    """Names the lease at the holder."""
    holder: WorkerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    request_id: RequestId
    model: str
    attempt: int
    num_prompt_tokens: int
    """Tokens to have KV for before the first step: the prompt and, in a retry, the accepted tokens."""
    max_new_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    gateway_id: GatewayId
    gateway_incarnation: Incarnation
    deadline_s: float
    age_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    excluded_workers: tuple[tuple[WorkerId, Incarnation], ...] = ()
    """Blamed incarnations: a restarted worker is a new one and is not excluded."""
    excluded_pairs: tuple[tuple[WorkerId, Incarnation, WorkerId, Incarnation], ...] = ()
    """(prefill, its incarnation, decode, its incarnation) of failed hand-offs."""
    held: HeldHandoff | None = None
    """Where a decode worker alone would do."""
    traceparent: str = ""
    ended: "tuple[PlacementEnd, ...]" = ()
    """What ended at this gateway since it last told the router: taken before the choice is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the router expects of a path; kept beside what happened."""

    prefill_wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    ttft_s: float = 0.0
    num_cached_tokens: int = 0
    """Of the prompt, with whoever reads it: they need not be computed."""
    num_kept_tokens: int = 0
    """Of the prompt, with D: they need not be moved. 0 in ``local`` mode, where nothing is moved."""
    cost_s: float = 0.0
    """What the choice went by: the lowest wins. More than this request's own time counts in it."""
    itl_harm_s: float = 0.0
    """By which a prefill between running answers holds those up, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    placement_id: PlacementId
    handoff_id: HandoffId
    mode: Mode
    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    """None in ``local`` mode."""
    is_held: bool = False
    """``prefill`` has what was asked with ``held``, under the same ``handoff_id``: D claims it, nothing is computed."""
    prediction: Prediction = field(default_factory=Prediction)
    runner_up: str = ""
    """The second best path; empty where there was no other."""
    runner_up_prediction: Prediction = field(default_factory=Prediction)
    reason: str = ""
    ticket: bytes = b""
    """Signed by the router for one claim; empty while the cluster runs without tickets."""
    queue_s: float = 0.0
    """How long the placement waited at the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEnd:
    """The gateway's word that a placement is over; the router forgets its estimates."""

    placement_id: PlacementId
    """Empty: the gateway never heard of it, whatever was placed for this attempt is over."""
    request_id: RequestId
    attempt: int
    outcome: str
    """``ok`` or the slug of the error that ended the attempt."""
    num_generated: int = 0
    """Tokens of the answer that this attempt has brought."""
    blamed_worker: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitRequest:
    request: GenerateRequest
    handoff_id: HandoffId
    mode: Mode
    worker_incarnation: Incarnation
    """Whom the placement meant; another incarnation refuses with StaleIncarnation."""
    prefill: WorkerAddress | None = None
    is_held: bool = False
    """The hand-off was made for another claim: an attempt before this one."""
    ticket: bytes = b""
    stream_key: int = 0
    """The gateway's name for the first choice of this attempt in `PlainTokens`, the others follow: never used again by
    this incarnation. 0: it wants chunks only."""


class AdmitVerdict(StrEnum):
    """``accepted``: blocks are reserved. ``queued``: an AttemptAccepted follows on the outputs stream. Refusals are
    errors."""

    ACCEPTED = "accepted"
    QUEUED = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitReply:
    verdict: AdmitVerdict
    num_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    request: GenerateRequest
    handoff_id: HandoffId
    worker_incarnation: Incarnation
    decode: WorkerAddress | None = None
    """Who is expected to claim; informative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The token sampled on P, once. ``index`` counts generated tokens (0, or more in a retry)."""

    choice: int
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReply:
    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    stages: StageTimes
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If they were asked for: of the prompt's tokens from the second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Ends an attempt at a worker. ``attempt`` 0 means every attempt of the request."""

    request_id: RequestId
    attempt: int
    reason: str
    choices: tuple[int, ...] = ()
    """To a decode worker: only these choices are not read any more, the others go on. Empty is all of them."""
    is_resumed: bool = False
    """To a decode worker: another attempt will claim what a prefill worker holds for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply:
    """``found`` is false when the worker knows nothing (or nothing any more). Blocks are back when this is answered,
    except those still under transfer (``num_custody_blocks``), which follow when their operations are terminal."""

    found: bool
    num_custody_blocks: int = 0


# -- membership -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What router and gateways learn of a model from its workers."""

    name: str
    format_hash: str
    block_size: int
    max_context: int
    vocab_size: int
    execution: ExecutionKind = ExecutionKind.REAL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRegistration:
    """The first message of a worker's membership stream."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    model: ModelRecord
    revision: str = ""
    address: str
    http_address: str
    pid: int
    hostname: str
    labels: tuple[tuple[str, str], ...] = ()
    num_blocks: int
    block_bytes: int
    max_sequences: int
    max_step_tokens: int
    transfer_backend: str
    max_mixed_tokens: int = 0
    """Prompt tokens of a step in which answers advance too; 0 says that there is no such limit."""
    is_caching: bool = True
    """Blocks are kept for their content: who begins alike finds them."""

    @property
    def pairing(self) -> tuple[str, str]:
        """Workers of a model hand off only where this is equal: KV format and revision."""
        return self.model.format_hash, self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step and how long it took on the step thread; nobody's waiting is in it."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSample:
    """One hand-off that a decode worker took, by its clock."""

    prefill: tuple[WorkerId, Incarnation]
    num_bytes: int
    """Still to move when the grant was there."""
    seconds: float
    """From the grant until the sequence could run, without the wait for the transfer thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSamples:
    """What a worker measured since its last heartbeat: some of it, the latest of each kind."""

    steps: tuple[StepSample, ...] = ()
    handoffs: tuple[HandoffSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A heartbeat: the worker's own numbers. Counters are totals of this incarnation."""

    state: WorkerState
    num_running: int = 0
    num_waiting: int = 0
    queued_prompt_tokens: int = 0
    """Prompt tokens admitted and not yet computed."""
    blocks: BlockCounts
    num_leases: int = 0
    held_bytes: int = 0
    num_transfers: int = 0
    """Transfers in flight."""
    kv_bytes_received: tuple[tuple[str, int], ...] = ()
    """By transfer backend."""
    kv_bytes_sent: tuple[tuple[str, int], ...] = ()
    """By transfer backend, as far as P can know: bytes of released leases whose outcome was ok."""
    prompt_tokens_computed: int = 0
    prompt_tokens_refetched: int = 0
    """Of hand-offs that were taken by another claim than the first: they would have been computed again."""
    tokens_generated: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    """Seconds spent in steps."""
    broken_pairs: tuple[tuple[WorkerId, Incarnation], ...] = ()
    """Prefill workers from which this worker takes nothing now: their hand-offs failed in a row."""
    next_role: Role | None = None
    """Draining: the role that it takes afterwards, in the same process. None: it leaves."""
    drain_left_s: float | None = None
    """Draining: until what is unfinished is handed back."""
    stored_hashes: tuple[BlockHash, ...] = ()
    evicted_hashes: tuple[BlockHash, ...] = ()
    samples: CostSamples = CostSamples()
    pairs: "tuple[PairStatus, ...]" = ()
    """Of a decode worker, now and then: all that it knows. Empty: nothing is said of them."""


class CommandKind(StrEnum):
    JOINED = "joined"
    """The first command: the registration was taken."""
    PEERS = "peers"
    """The peers have changed."""
    DRAIN = "drain"
    """Finish, then leave."""
    FLIP = "flip"
    """Finish, then serve as a worker of another role: a new incarnation in the same process."""
    REREGISTER = "reregister"
    """The router does not know this worker (any more): send the registration again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketKey:
    """By which one prefill worker checks the tickets of its readers (core/tickets.py)."""

    secret: bytes = field(repr=False)
    age_s: float
    """At the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """What the router tells a worker over its membership stream."""

    kind: CommandKind
    reason: str = ""
    role: Role | None = None
    """Of a flip: the role to take."""
    peers: tuple[WorkerAddress, ...] = ()
    """With JOINED and PEERS: the live workers of the other role whose KV has this worker's format."""
    tickets: tuple[bytes, ...] = field(default=(), repr=False)
    """Of a cluster with tickets, to a decode worker: by which it is introduced to each of ``peers``."""
    ticket_key: TicketKey | None = None
    """Of a cluster with tickets, to a prefill worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as an operator sees it."""

    registration: WorkerRegistration
    load: WorkerLoad
    state: WorkerState
    """The router's judgement."""
    heartbeat_age_s: float
    next_role: Role | None = None
    """As asked for or as the worker says: the role that it takes after its drain."""

    @property
    def final_role(self) -> Role | None:
        """Of the pool in which it will be once what was asked of it is done; None: in no pool."""
        if WorkerState.DRAINING in (self.state, self.load.state) or self.next_role is not None:
            return self.next_role
        return self.registration.role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    model: str
    role: Role
    desired: int
    ready: int
    problem: str = ""
    """Why the launcher cannot bring it to its size, in its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    gateway_id: GatewayId
    incarnation: Incarnation
    http_address: str
    pid: int
    num_requests: int
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    router_incarnation: Incarnation
    router_pid: int
    router_http_address: str
    pools: tuple[PoolStatus, ...]
    workers: tuple[WorkerStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    models: tuple[ModelRecord, ...]
    num_placements: int
    """Placements whose end was not reported yet."""
    num_waiting: int
    """Requests waiting at the router for a worker."""
    scaling: tuple["ScalingStatus", ...] = ()
    """Of models whose autoscaler is not off."""
    rollouts: tuple["Rollout", ...] = ()
    """The last of each model, over or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What all workers of a model are to become; the router keeps it, launchers make it true."""

    model: str
    revision: str
    section: str = field(repr=False)
    """The model's section of the configuration, with this revision, as JSON."""
    age_s: float
    """How long ago somebody asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Desired size of one pool; the router owns it, launchers watch it."""

    model: str
    role: Role
    replicas: int
    age_s: float | None = None
    """How long ago somebody said so; None: nobody did, it is the configuration's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """What the autoscaler of a model decided last."""

    model: str
    mode: str
    """``observe`` or ``act``."""
    action: str
    reason: str
    targets: tuple[PoolSize, ...] = ()
    """What the sizes would be without guards; ``age_s`` is the decision's."""
    needs: tuple[tuple[Role, float], ...] = ()
    """In workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProblem:
    """Why a pool does not come to its size."""

    model: str
    role: Role
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """What a launcher tells the router: the sizes it was told last, which a restarted router has forgotten, and what
    it cannot do."""

    pools: tuple[PoolSize, ...]
    problems: tuple[PoolProblem, ...] = ()
    rollouts: tuple[Rollout, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt at a request: where it was placed and why, what was expected, how it ended."""

    attempt: int
    started_s: float
    """Since the gateway received the request."""
    duration_s: float
    num_choices: int
    """All of the request, but in retries of choices that have come apart."""
    outcome: str
    """``ok`` or the slug of the error that ended it."""
    message: str = ""
    """Of the error."""
    placement: Placement | None = None
    """None: the router had none to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInterval:
    """A part of a request's life on the time axis."""

    stage: str
    """A `Stage`."""
    start_s: float
    """Since the gateway received the request."""
    duration_s: float
    attempt: int = 0
    """Before the first: 0."""
    worker: str = ""
    """Whose it was; empty for the gateway, the router and the ways between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A finished request, pushed by its gateway to the router's bounded ring."""

    request_id: RequestId
    model: str
    outcome: str
    """A finish reason or an error slug."""
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    attempts: int
    mode: str
    prefill_worker: str
    decode_worker: str
    reason: str
    """Of the placement."""
    stages: tuple[tuple[str, float], ...]
    """(stage, seconds): they partition the critical path and sum to ``duration_s``."""
    ttft_s: float
    duration_s: float
    traceparent: str = ""
    transfer_bytes: int = 0
    transfer_backend: str = ""
    history: tuple[AttemptRecord, ...] = ()
    """The latest attempts, in the order of their ends."""
    timeline: tuple[StageInterval, ...] = ()
    """The same stages in order: each interval begins where the one before it ends."""
    times: StageTimes | None = None
    """As the decode worker of the last attempt measured them, chunks of the transfer included."""
    workload_class: str = ""
    """``<prompt>-<answer>-<tenant>``, of closed sets (gateway/workload.py)."""
    age_s: float = 0.0
    """Since the end of the request, as of the message that brings the record."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecords:
    """What the router's ring has of a question, and how far back it reaches."""

    records: tuple[RequestRecord, ...] = ()
    """Newest first."""
    num_kept: int = 0
    """Records in the ring, of any request."""
    max_kept: int = 0
    oldest_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    """A gateway's heartbeat to the router, with the records of requests that ended since the last one."""

    gateway_id: GatewayId
    incarnation: Incarnation
    http_address: str
    pid: int
    num_requests: int
    records: tuple[RequestRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What the router tells a gateway in answer: which models can be served now, and by what."""

    models: tuple[ModelRecord, ...]
    usable: tuple[tuple[str, bool, str], ...]
    """(model, has a path of ready workers, why not)."""


# -- what is told to who watches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatus:
    """A pair as its decode worker knows it: the link in use, as the last handshake measured it, and totals since the
    worker's start."""

    prefill: WorkerId
    prefill_incarnation: Incarnation
    decode: WorkerId
    backend: str = ""
    """Empty where no link is usable."""
    mode: str = ""
    lane: str = ""
    """What carries the bytes, as far as it can be seen."""
    bytes_per_s: float = 0.0
    memcpy_bytes_per_s: float = 0.0
    """Copying the same bytes within D, at the same time."""
    circuit: str = ""
    """``closed``: hand-offs may begin. Otherwise the pair is in quarantine."""
    why: str = ""
    """The last failure that counted, or why no link is usable."""
    num_bytes: int = 0
    busy_s: float = 0.0
    """In which those bytes moved."""
    num_handoffs: int = 0
    num_failures: int = 0


class EventKind(StrEnum):
    """What happened to a cluster, by which an operator looks for it."""

    JOINED = "joined"
    SUSPECT = "suspect"
    RECOVERED = "recovered"
    DEATH = "death"
    """A worker or a gateway is gone that had not said so."""
    LEFT = "left"
    SCALE = "scale"
    DRAIN = "drain"
    FLIP = "flip"
    QUARANTINE = "quarantine"
    """A pair is left alone, or trusted again."""
    SHED = "shed"
    """Requests were refused room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    number: int
    """Names it: an event that goes on is told again under its number."""
    kind: EventKind
    subject: str
    """A worker, a gateway, a pair or a model."""
    text: str
    age_s: float
    """Since it happened last."""
    count: int = 1
    """How often, where it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSample:
    """A short time of the cluster in numbers; what is of requests is of those that ended in it."""

    age_s: float
    """Since its end."""
    duration_s: float
    num_running: int = 0
    """At its end: in the batches of workers that answer."""
    num_waiting: int = 0
    """At its end: at the router and in workers."""
    prompt_tokens_per_s: float = 0.0
    """Computed."""
    tokens_per_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    """Moved between workers."""
    num_ended: int = 0
    num_failed: int = 0
    ttft_p50_s: float | None = None
    """None: no first token came to any of them."""
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    """Of the mean gap between tokens of each request; None: none had two tokens."""
    itl_p95_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNews:
    """The cluster now, and what came to pass since the news before: in the first ones, what is remembered."""

    status: ClusterStatus
    pairs: tuple[PairStatus, ...] = ()
    events: tuple[ClusterEvent, ...] = ()
    """Oldest first."""
    records: tuple[RequestRecord, ...] = ()
    """Oldest first; of very many the newest."""
    samples: tuple[ClusterSample, ...] = ()
    """Oldest first."""
