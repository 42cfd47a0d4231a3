"""Where a request runs: filter, score, pick. Pure functions of one snapshot; no clock, no I/O, no memory.

A path is ``split`` (a prefill and a decode worker with equal format hashes) or ``local`` (one worker reads the prompt
and answers). A score is minus a cost in units of "fully loaded worker": more load never raises it (law 6). Equal scores
go to the path that was chosen least often, so that idle workers share the work.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from core.types import Mode, PlaceRequest, Prediction, Role, WorkerAddress, WorkerState

SHORTAGE_COST = 4.0
"""Cost of blocks that are not free now, per pool size of missing blocks: waiting for room dominates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker as the policy sees it: what it is, how it is judged, and its load with the router's estimates."""

    address: WorkerAddress
    role: Role
    state: WorkerState
    model: str
    format_hash: str
    num_blocks: int
    block_size: int
    max_sequences: int
    max_step_tokens: int
    used_blocks: int = 0
    """Blocks that nobody else can have: in custody, in use, leased or promised."""
    queued_prompt_tokens: int = 0
    num_requests: int = 0
    """Running and waiting."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0 while unknown."""
    num_placed: int = 0
    """Placements ever made on this incarnation; breaks ties."""
    broken_pairs: frozenset[tuple[WorkerId, Incarnation]] = frozenset()
    """Prefill workers from which this decode worker takes nothing now."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything the policy may know at one moment."""

    candidates: tuple[Candidate, ...]
    pools: frozenset[tuple[str, Role]] = frozenset()
    """(model, role) of every pool that should have workers, whether or not one is there now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    mode: Literal["auto", "split", "local"] = "auto"
    projected_tokens: int = 256
    """Answer length assumed when the caller allows more."""


class Reason(StrEnum):
    """Why a path was picked; a label of the placement metrics, so the set is closed."""

    ONLY_PATH = "only_path"
    LEAST_LOADED = "least_loaded"
    LEAST_USED = "least_used"
    """Equal scores: the path that was chosen least often."""
    PAIR_EXCLUDED = "pair_excluded"
    """The hand-off of every pair had failed for this request: the decode worker prefills itself."""
    PAIR_BROKEN = "pair_broken"
    """The same, and at least one pair is broken for every request."""
    ONLY_PAIR_LEFT = "only_pair_left"
    """The same with ``mode: split`` forced: a failed pair is tried once more."""
    HELD = "held"
    """The prompt is computed, and held for a decode worker that has failed: only another one was needed."""
    FORGIVEN = "forgiven"
    """Set by the waiting room: nothing else came, so a worker that had failed this request gets another try."""


class Lack(StrEnum):
    """What is missing for a path; a label of the refusal metrics."""

    NO_WORKER = "no_worker"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_PAIR = "no_pair"
    """Both roles are there, but no pair has equal format hashes."""
    TOO_LONG = "too_long"
    """No worker of the model could hold the prompt even when empty: waiting cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A feasible way to serve the request."""

    mode: Mode
    decode: Candidate
    prefill: Candidate | None = None
    score: float
    is_held: bool = False
    """``prefill`` has nothing to compute: it holds what was asked with ``PlaceRequest.held``."""

    @property
    def num_placed(self) -> int:
        return self.decode.num_placed + (self.prefill.num_placed if self.prefill is not None else 0)

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.address.worker_id if self.prefill is not None else "", self.decode.address.worker_id

    def __str__(self) -> str:
        return f"{self.mode}:{'>'.join(filter(None, self.names))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    path: Path
    reason: Reason
    prediction: Prediction
    runner_up: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """No path now. ``message`` names the model and the missing role and what there is instead."""

    lack: Lack
    message: str


def decide(request: PlaceRequest, snapshot: Snapshot, settings: PolicySettings) -> Choice | Shortfall:
    """Filter, score, pick.

    Never a worker that is not ready, is excluded by (id, incarnation), serves another model or could not hold the
    prompt when empty. A pair that is excluded, or that its decode worker reports as broken, does no hand-off while the
    decode worker may prefill itself. What is held already is not computed again while its holder lives and a decode
    worker can be paired with it.
    """
    members = [c for c in snapshot.candidates if c.model == request.model]
    usable = [c for c in members if is_usable(c, request)]
    wants_split = settings.mode == "split" or (
        settings.mode == "auto" and (request.model, Role.PREFILL) in snapshot.pools
    )
    decodes = [c for c in usable if c.role is Role.DECODE]
    prefills = [c for c in usable if c.role is Role.PREFILL] if wants_split else []
    hosts = [c for c in usable if c.role is Role.UNIFIED] + ([] if wants_split else decodes)

    pairs = [(p, d) for p in prefills for d in decodes if p.format_hash == d.format_hash]
    excluded = set(request.excluded_pairs)
    whole = [(p, d) for p, d in pairs if _is_whole(p, d)]
    good = [(p, d) for p, d in whole if _pair_of(p, d) not in excluded]
    scores = _Scores.of(usable, request, settings)
    holder = _holder(request, members)
    if holder is not None:
        readers = [d for d in decodes if d.format_hash == holder.format_hash and _is_whole(holder, d)]
        held = [scores.held(holder, d) for d in readers if _pair_of(holder, d) not in excluded]
        if held:
            return _pick(request, held, reason=Reason.HELD)
    paths = [scores.split(p, d) for p, d in good] + [scores.local(c) for c in hosts]
    if paths:
        return _pick(request, paths, reason=None)
    if pairs and settings.mode == "split":
        return _pick(request, [scores.split(p, d) for p, d in whole or pairs], reason=Reason.ONLY_PAIR_LEFT)
    if pairs:
        ends = {d.address.worker_id: d for _, d in pairs}.values()
        reason = Reason.PAIR_EXCLUDED if len(whole) == len(pairs) else Reason.PAIR_BROKEN
        return _pick(request, [scores.local(d) for d in ends], reason=reason)
    return _shortfall(request, members, _needed_roles(request.model, snapshot, wants_split=wants_split))


def lack_of_path(model: str, snapshot: Snapshot, settings: PolicySettings) -> str:
    """Why no request at all could be placed on ``model`` now; empty when one could."""
    smallest = PlaceRequest(
        request_id=RequestId(""),
        model=model,
        attempt=1,
        num_prompt_tokens=1,
        max_new_tokens=1,
        gateway_id=GatewayId(""),
        gateway_incarnation=Incarnation(0),
        deadline_s=0.0,
    )
    outcome = decide(smallest, snapshot, settings)
    return outcome.message if isinstance(outcome, Shortfall) else ""


def is_usable(candidate: Candidate, request: PlaceRequest) -> bool:
    """Ready, not blamed, and large enough for the prompt and one token."""
    return (
        candidate.state is WorkerState.READY
        and not _is_excluded(candidate, request)
        and _can_hold(candidate, request.num_prompt_tokens)
    )


# -- scores -----------------------------------------------------------------------------------------------------------


def prefill_score(candidate: Candidate, num_tokens: int) -> float:
    """Minus the steps until a prompt of ``num_tokens`` would be computed, and minus the blocks it lacks."""
    steps = (candidate.queued_prompt_tokens + num_tokens) / candidate.max_step_tokens
    return -(steps + SHORTAGE_COST * _shortage(candidate, num_tokens))


def decode_score(candidate: Candidate, num_tokens: int) -> float:
    """Minus the shares of blocks and batch slots in use with ``num_tokens`` (prompt, projected answer) placed."""
    room = (candidate.used_blocks + candidate.blocks_for(num_tokens)) / candidate.num_blocks
    batch = (candidate.num_requests + 1) / candidate.max_sequences
    return -(room + batch + SHORTAGE_COST * _shortage(candidate, num_tokens))


def _shortage(candidate: Candidate, num_tokens: int) -> float:
    missing = candidate.used_blocks + candidate.blocks_for(num_tokens) - candidate.num_blocks
    return max(0, missing) / candidate.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Both scores of every usable worker, by id: paths share them."""

    reads: dict[WorkerId, float]
    writes: dict[WorkerId, float]

    @classmethod
    def of(cls, usable: Sequence[Candidate], request: PlaceRequest, settings: PolicySettings) -> "_Scores":
        num_tokens = request.num_prompt_tokens
        projected = num_tokens + min(request.max_new_tokens, settings.projected_tokens)
        return cls(
            reads={c.address.worker_id: prefill_score(c, num_tokens) for c in usable},
            writes={c.address.worker_id: decode_score(c, projected) for c in usable},
        )

    def split(self, prefill: Candidate, decode: Candidate) -> Path:
        score = self.reads[prefill.address.worker_id] + self.writes[decode.address.worker_id]
        return Path(mode=Mode.SPLIT, prefill=prefill, decode=decode, score=score)

    def held(self, holder: Candidate, decode: Candidate) -> Path:
        score = self.writes[decode.address.worker_id]
        return Path(mode=Mode.SPLIT, prefill=holder, decode=decode, score=score, is_held=True)

    def local(self, worker: Candidate) -> Path:
        score = self.reads[worker.address.worker_id] + self.writes[worker.address.worker_id]
        return Path(mode=Mode.LOCAL, decode=worker, score=score)


# -- picking ----------------------------------------------------------------------------------------------------------


def _pick(request: PlaceRequest, paths: Sequence[Path], *, reason: Reason | None) -> Choice:
    ranked = sorted(paths, key=lambda path: (-path.score, path.num_placed, path.names))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    if reason is None:
        if second is None:
            reason = Reason.ONLY_PATH
        else:
            reason = Reason.LEAST_USED if second.score == best.score else Reason.LEAST_LOADED
    return Choice(path=best, reason=reason, prediction=_predict(request, best), runner_up=second)


def _predict(request: PlaceRequest, path: Path) -> Prediction:
    """From the prefill worker's measured rate; zero where nothing was measured yet, and where nothing is computed."""
    if path.is_held:
        return Prediction()
    rate = path.prefill.prefill_tokens_per_s if path.prefill is not None else path.decode.prefill_tokens_per_s
    if rate <= 0:
        return Prediction()
    wait_s = (path.prefill or path.decode).queued_prompt_tokens / rate
    prefill_s = request.num_prompt_tokens / rate
    return Prediction(prefill_wait_s=wait_s, prefill_s=prefill_s, ttft_s=wait_s + prefill_s)


# -- refusing ---------------------------------------------------------------------------------------------------------


def _pair_of(prefill: Candidate, decode: Candidate) -> tuple[WorkerId, Incarnation, WorkerId, Incarnation]:
    p, d = prefill.address, decode.address
    return p.worker_id, p.incarnation, d.worker_id, d.incarnation


def _holder(request: PlaceRequest, members: Iterable[Candidate]) -> Candidate | None:
    """Who holds what the request asks for, if it is there still. A worker that drains waits for its leases to end."""
    held, there = request.held, (WorkerState.READY, WorkerState.DRAINING)
    if held is None:
        return None
    return next(
        (c for c in members if c.address == held.holder and c.state in there and not _is_excluded(c, request)), None
    )


def _is_whole(prefill: Candidate, decode: Candidate) -> bool:
    return (prefill.address.worker_id, prefill.address.incarnation) not in decode.broken_pairs


def _is_excluded(candidate: Candidate, request: PlaceRequest) -> bool:
    return (candidate.address.worker_id, candidate.address.incarnation) in request.excluded_workers


def _can_hold(candidate: Candidate, num_prompt_tokens: int) -> bool:
    return candidate.blocks_for(num_prompt_tokens + 1) <= candidate.num_blocks


def _needed_roles(model: str, snapshot: Snapshot, *, wants_split: bool) -> tuple[Role, ...]:
    """The roles that a path of ``model`` is made of, in the order of the request."""
    here = {role for name, role in snapshot.pools if name == model} | {
        c.role for c in snapshot.candidates if c.model == model
    }
    if wants_split:
        return (Role.PREFILL, Role.DECODE)
    return tuple(role for role in (Role.DECODE, Role.UNIFIED) if role in here) or (Role.DECODE,)


def _shortfall(request: PlaceRequest, members: Sequence[Candidate], roles: Sequence[Role]) -> Shortfall:
    subject = f"model {request.model!r}"
    if members and not any(_can_hold(c, request.num_prompt_tokens) for c in members):
        most = max(c.num_blocks * c.block_size for c in members)
        message = (
            f"the prompt of {request.num_prompt_tokens} tokens does not fit a worker of {subject}, whose KV pool holds "
            f"{most} tokens: shorten the prompt, or raise kv.num_blocks or kv.memory_bytes of the model"
        )
        return Shortfall(lack=Lack.TOO_LONG, message=message)
    lacking = [role for role in roles if not any(c.role is role and is_usable(c, request) for c in members)]
    if not lacking:
        message = f"{subject} has ready prefill and decode workers, but no pair of them with equal KV formats"
        return Shortfall(lack=Lack.NO_PAIR, message=message)
    lack = Lack.NO_DECODE if set(lacking) != {Role.PREFILL} else Lack.NO_PREFILL
    parts = [f"no ready {role} worker ({_census(request, (c for c in members if c.role is role))})" for role in lacking]
    return Shortfall(lack=lack if members else Lack.NO_WORKER, message=f"{subject} has {' and '.join(parts)}")


def _census(request: PlaceRequest, workers: Iterable[Candidate]) -> str:
    """``1 starting, 2 suspect``, or ``none registered``."""
    counts = Counter(
        "failed this request"
        if c.state is WorkerState.READY and _is_excluded(c, request)
        else "too small"
        if c.state is WorkerState.READY
        else str(c.state)
        for c in workers
    )
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none registered"
