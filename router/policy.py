"""Where a request runs: filter, score, pick. Pure functions of one snapshot; no clock, no I/O, no memory.

A path is ``split`` (a prefill and a decode worker with equal format hashes) or ``local`` (one worker reads the prompt
and answers). A score is minus a cost in units of "fully loaded worker": more load never raises it (law 6). Equal scores
go to the path that was chosen least often, so that idle workers share the work.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from core.types import Mode, PlaceRequest, Prediction, Role, WorkerAddress, WorkerState
from router.break_even import WORST, Weights, explores, predict_local, predict_split
from router.costs import Costs

SHORTAGE_COST = 4.0
"""Cost of blocks that are not free now, per pool size of missing blocks: waiting for room dominates."""
WORK_COST = 2.0
"""Cost of a token that is computed, over that of one that is waited for: whoever comes next waits for it too. So a
request rather queues for a prefix than has it computed once more elsewhere, up to twice the wait."""
MOVE_COST = 0.1
"""Cost of a token whose KV is moved, over that of one that is computed."""


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
    block_bytes: int = 0
    used_blocks: int = 0
    """Blocks that nobody else can have: in custody, in use, leased or promised."""
    queued_prompt_tokens: int = 0
    num_requests: int = 0
    """Running and waiting."""
    num_placed: int = 0
    """Placements ever made on this incarnation; breaks ties."""
    held_blocks: int = 0
    """Of a prefill worker: computed or under computation, for decode workers to take."""
    num_transfers: int = 0
    """In flight to a decode worker."""
    is_refusing: bool = False
    """It has refused a request for lack of room since its last report."""
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
    overlaps: Mapping[tuple[WorkerId, Incarnation], int] = field(default_factory=dict)
    """Blocks at the front of this request that a worker holds, or is about to; none where it is not named."""
    costs: Costs = field(default_factory=Costs)
    absent: frozenset[tuple[str, Role]] = frozenset()
    """Of ``pools``, those without a ready worker for longer than a start takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    mode: Literal["auto", "split", "local"] = "auto"
    policy: Literal["prefix_aware", "round_robin"] = "prefix_aware"
    projected_tokens: int = 256
    """Answer length assumed when the caller allows more."""
    weights: Weights = field(default_factory=Weights)
    explore: float = 0.0
    """Share of requests that explore; ``seed`` and their id say which."""
    seed: int = 0
    fallback: Literal["allow", "when_short", "deny"] = "allow"
    fallback_tokens: int = 1024

    @property
    def is_weighing(self) -> bool:
        """What is cheaper decides between split and local."""
        return self.mode == "auto" and self.policy != "round_robin"

    def may_fall_back(self, request: PlaceRequest) -> bool:
        """A decode worker may do what prefill workers cannot do now."""
        is_short = request.num_prompt_tokens <= self.fallback_tokens
        return self.fallback == "allow" or (self.fallback == "when_short" and is_short)


class Reason(StrEnum):
    """Why a path was picked; a label of the placement metrics, so the set is closed."""

    ONLY_PATH = "only_path"
    LEAST_LOADED = "least_loaded"
    LEAST_USED = "least_used"
    """Equal scores: the path that was chosen least often."""
    CACHED_PREFIX = "cached_prefix"
    """Without what its workers hold of the prompt another path would have been picked."""
    ROUND_ROBIN = "round_robin"
    """By setting, whatever load and caches say."""
    LOCAL_CHEAPER = "local_cheaper"
    """Predicted to cost less than the best split, which is the runner-up."""
    SPLIT_CHEAPER = "split_cheaper"
    """The only split, and predicted to cost less than the best local path."""
    EXPLORED = "explored"
    """The dearer way, by the share of requests that keep its cost known."""
    PREFILL_MISSING = "prefill_missing"
    """No prefill worker is there for this request: the decode worker prefills itself."""
    PAIR_EXCLUDED = "pair_excluded"
    """The hand-off of every pair had failed for this request: the decode worker prefills itself."""
    PAIR_BROKEN = "pair_broken"
    """The same, and at least one pair is broken for every request."""
    ONLY_PAIR_LEFT = "only_pair_left"
    """The same where no fallback is allowed: a failed pair is tried once more."""
    HELD = "held"
    """The prompt is computed, and held for a decode worker that has failed: only another one was needed."""
    FORGIVEN = "forgiven"
    """Set by the waiting room: nothing else came, so a worker that had failed this request gets another try."""


FALLBACKS = frozenset({Reason.PREFILL_MISSING, Reason.PAIR_EXCLUDED, Reason.PAIR_BROKEN})
"""Local because it could not be split."""


class Lack(StrEnum):
    """What is missing for a path; a label of the refusal metrics."""

    NO_WORKER = "no_worker"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_PAIR = "no_pair"
    """Both roles are there, but no pair has equal format hashes."""
    TOO_LONG = "too_long"
    """No worker of the model could hold the prompt even when empty: waiting cannot help."""
    NO_ROOM = "no_room"
    """There is a path, and it has enough to do: waiting helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A feasible way to serve the request."""

    mode: Mode
    decode: Candidate
    prefill: Candidate | None = None
    score: float
    saved: float = 0.0
    """Part of the score: what it would be lower by if the workers held nothing of the prompt."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that whoever reads it need not compute."""
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
    runner_up_prediction: Prediction = field(default_factory=Prediction)

    def over(self, other: "Choice", reason: Reason) -> "Choice":
        """The same instead of another one."""
        return replace(self, reason=reason, runner_up=other.path, runner_up_prediction=other.prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """No path now. ``message`` names the model and the missing role and what there is instead."""

    lack: Lack
    message: str
    ttft_s: float = 0.0
    """Predicted, from the moment of placing, where there is a path."""


def decide(request: PlaceRequest, snapshot: Snapshot, settings: PolicySettings) -> Choice | Shortfall:
    """Filter, score, pick.

    Never a worker that is not ready, is excluded by (id, incarnation), serves another model or could not hold the
    prompt when empty. A pair that is excluded, or that its decode worker reports as broken, does no hand-off while the
    decode worker may prefill itself. What is held already is not computed again while its holder lives and a decode
    worker can be paired with it. Where a request can go both ways, the cheaper one is taken (router/break_even.py).
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
    scores = _Scores.of(usable, request, snapshot, settings)
    holder = _holder(request, members)
    if holder is not None:
        readers = [d for d in decodes if d.format_hash == holder.format_hash and _is_whole(holder, d)]
        held = [scores.held(holder, d) for d in readers if _pair_of(holder, d) not in excluded]
        if held:
            return _pick(request, held, snapshot, settings, reason=Reason.HELD)
    splits = [scores.split(p, d) for p, d in good]
    if splits and settings.is_weighing and request.model in snapshot.costs.measured:
        locals_ = [scores.local(c) for c in (*hosts, *decodes)]
        return _cheaper(request, splits, locals_, snapshot, settings)
    if paths := splits + [scores.local(c) for c in hosts]:
        return _pick(request, paths, snapshot, settings)
    if pairs and not settings.may_fall_back(request):
        left = [scores.split(p, d) for p, d in whole or pairs]
        return _pick(request, left, snapshot, settings, reason=Reason.ONLY_PAIR_LEFT)
    if pairs:
        ends = {d.address.worker_id: d for _, d in pairs}.values()
        reason = Reason.PAIR_EXCLUDED if len(whole) == len(pairs) else Reason.PAIR_BROKEN
        return _pick(request, [scores.local(d) for d in ends], snapshot, settings, reason=reason)
    is_missing = not prefills and _is_prefill_missing(request, members, snapshot)
    if decodes and is_missing and settings.may_fall_back(request):
        locals_ = [scores.local(d) for d in decodes]
        return _pick(request, locals_, snapshot, settings, reason=Reason.PREFILL_MISSING)
    return _shortfall(request, members, _needed_roles(request.model, snapshot, wants_split=wants_split), settings)


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


def prefill_score(candidate: Candidate, num_tokens: int, num_cached: int = 0) -> float:
    """Minus the steps until a prompt of ``num_tokens`` would be computed (its own more than once, ``num_cached`` tokens
    of it not at all), and minus the blocks it lacks."""
    num_tokens_paid = candidate.queued_prompt_tokens + WORK_COST * (num_tokens - num_cached)
    steps = num_tokens_paid / candidate.max_step_tokens
    return -(steps + SHORTAGE_COST * _shortage(candidate, num_tokens))


def move_score(candidate: Candidate, num_tokens: int, num_cached: int = 0) -> float:
    """Minus the cost of moving to a decode worker what it does not hold of a prompt."""
    return -MOVE_COST * (num_tokens - num_cached) / candidate.max_step_tokens


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
    """All scores of every usable worker, by id: paths share them. ``saved`` is what a cached prefix is worth in one."""

    num_cached: dict[WorkerId, int]
    reads: dict[WorkerId, float]
    reads_saved: dict[WorkerId, float]
    moves: dict[WorkerId, float]
    moves_saved: dict[WorkerId, float]
    writes: dict[WorkerId, float]

    @classmethod
    def of(
        cls, usable: Sequence[Candidate], request: PlaceRequest, snapshot: Snapshot, settings: PolicySettings
    ) -> "_Scores":
        num_tokens = request.num_prompt_tokens
        projected = num_tokens + min(request.max_new_tokens, settings.projected_tokens)
        num_cached = {c.address.worker_id: _num_cached(c, num_tokens, snapshot) for c in usable}
        reads, moves, reads_saved, moves_saved = {}, {}, {}, {}
        for candidate in usable:
            name = candidate.address.worker_id
            reads[name] = prefill_score(candidate, num_tokens, num_cached[name])
            moves[name] = move_score(candidate, num_tokens, num_cached[name])
            num_steps_saved = num_cached[name] / candidate.max_step_tokens
            reads_saved[name], moves_saved[name] = WORK_COST * num_steps_saved, MOVE_COST * num_steps_saved
        return cls(
            num_cached=num_cached,
            reads=reads,
            reads_saved=reads_saved,
            moves=moves,
            moves_saved=moves_saved,
            writes={c.address.worker_id: decode_score(c, projected) for c in usable},
        )

    def split(self, prefill: Candidate, decode: Candidate) -> Path:
        p, d = prefill.address.worker_id, decode.address.worker_id
        return Path(
            mode=Mode.SPLIT,
            prefill=prefill,
            decode=decode,
            score=self.reads[p] + self.moves[d] + self.writes[d],
            saved=self.reads_saved[p] + self.moves_saved[d],
            num_cached_tokens=self.num_cached[p],
        )

    def held(self, holder: Candidate, decode: Candidate) -> Path:
        d = decode.address.worker_id
        return Path(
            mode=Mode.SPLIT,
            prefill=holder,
            decode=decode,
            score=self.moves[d] + self.writes[d],
            saved=self.moves_saved[d],
            is_held=True,
        )

    def local(self, worker: Candidate) -> Path:
        w = worker.address.worker_id
        return Path(
            mode=Mode.LOCAL,
            decode=worker,
            score=self.reads[w] + self.writes[w],
            saved=self.reads_saved[w],
            num_cached_tokens=self.num_cached[w],
        )


def _num_cached(candidate: Candidate, num_tokens: int, snapshot: Snapshot) -> int:
    """One token at least is computed: the answer begins with what it says."""
    num_blocks = snapshot.overlaps.get((candidate.address.worker_id, candidate.address.incarnation), 0)
    return max(0, min(num_blocks * candidate.block_size, num_tokens - 1))


# -- picking ----------------------------------------------------------------------------------------------------------


def _cheaper(
    request: PlaceRequest,
    splits: Sequence[Path],
    locals_: Sequence[Path],
    snapshot: Snapshot,
    settings: PolicySettings,
) -> Choice:
    """The best of both ways, and of these the one that costs less, or for some requests the other one."""
    ways = [_pick(request, splits, snapshot, settings), _pick(request, locals_, snapshot, settings)]
    costs = [way.prediction.cost_s for way in ways]
    best = 0 if costs[0] <= costs[1] else 1
    is_exploring = request.attempt == 1 and explores(request.request_id, share=settings.explore, seed=settings.seed)
    if is_exploring and costs[1 - best] <= WORST * costs[best]:
        return ways[1 - best].over(ways[best], Reason.EXPLORED)
    if best == 1:
        return ways[1].over(ways[0], Reason.LOCAL_CHEAPER)
    return ways[0] if len(splits) > 1 else ways[0].over(ways[1], Reason.SPLIT_CHEAPER)


def _pick(
    request: PlaceRequest,
    paths: Sequence[Path],
    snapshot: Snapshot,
    settings: PolicySettings,
    *,
    reason: Reason | None = None,
) -> Choice:
    if settings.policy == "round_robin":
        ranked = sorted(paths, key=lambda path: (path.num_placed, path.names))
    else:
        ranked = sorted(paths, key=lambda path: _rank(path, path.score))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    if reason is None:
        reason = _reason(ranked, settings)
    predictions = [_predict(request, path, snapshot, settings) for path in ranked[:2]]
    return Choice(
        path=best,
        reason=reason,
        prediction=predictions[0],
        runner_up=second,
        runner_up_prediction=predictions[1] if second is not None else Prediction(),
    )


def _rank(path: Path, score: float) -> tuple[float, int, tuple[str, str]]:
    return -score, path.num_placed, path.names


def _reason(ranked: Sequence[Path], settings: PolicySettings) -> Reason:
    """Why the first of them, where no failure decided."""
    best = ranked[0]
    if len(ranked) == 1:
        return Reason.ONLY_PATH
    if settings.policy == "round_robin":
        return Reason.ROUND_ROBIN
    if best.saved > 0 and min(ranked, key=lambda path: _rank(path, path.score - path.saved)) is not best:
        return Reason.CACHED_PREFIX
    return Reason.LEAST_USED if ranked[1].score == best.score else Reason.LEAST_LOADED


def _predict(request: PlaceRequest, path: Path, snapshot: Snapshot, settings: PolicySettings) -> Prediction:
    """Times are zero where nothing was measured yet, and where nothing is computed."""
    num_tokens, num_cached = request.num_prompt_tokens, path.num_cached_tokens
    num_kept = 0 if path.prefill is None else _num_cached(path.decode, num_tokens, snapshot)
    if path.is_held or request.model not in snapshot.costs.measured:
        return Prediction(num_cached_tokens=num_cached, num_kept_tokens=num_kept)
    if path.prefill is None:
        predicted = predict_local(snapshot.costs, path.decode, num_tokens=num_tokens, num_cached=num_cached)
    else:
        predicted = predict_split(
            snapshot.costs,
            path.prefill,
            path.decode,
            num_tokens=num_tokens,
            num_cached=num_cached,
            num_kept=num_kept,
        )
    return replace(predicted, cost_s=settings.weights.cost_s(predicted))


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


def _is_prefill_missing(request: PlaceRequest, members: Iterable[Candidate], snapshot: Snapshot) -> bool:
    """It is not only starting anew, or those that are there have failed this request."""
    has_failed = any(c.role is Role.PREFILL and _is_excluded(c, request) for c in members)
    return has_failed or (request.model, Role.PREFILL) in snapshot.absent


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


def _shortfall(
    request: PlaceRequest, members: Sequence[Candidate], roles: Sequence[Role], settings: PolicySettings
) -> Shortfall:
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
    message = f"{subject} has {' and '.join(parts)}"
    if lacking == [Role.PREFILL] and not settings.may_fall_back(request):
        message += f"; decode workers may not prefill it themselves (router.fallback is {settings.fallback})"
    return Shortfall(lack=lack if members else Lack.NO_WORKER, message=message)


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
