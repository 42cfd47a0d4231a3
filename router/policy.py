"""Where a request runs: filter, score, pick. Pure functions of one snapshot; no clock, no I/O, no memory.

A path is ``split`` (a prefill and a decode worker with equal format hashes) or ``local`` (one worker reads the prompt
and answers). Which workers may serve at all says router/shortfall.py, what a path costs router/scores.py. Equal scores
go to the path that was chosen least often, so that idle workers share the work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from core.types import PlaceRequest, Prediction, Role, WorkerState
from router.break_even import WORST, explores, predict_local, predict_split
from router.scores import Path, Scores, num_cached_tokens
from router.shortfall import Lack, Shortfall, is_excluded, is_usable, needed_roles, shortfall
from router.snapshot import Candidate, PolicySettings, Snapshot

__all__ = [
    "FALLBACKS",
    "Candidate",
    "Choice",
    "Lack",
    "Path",
    "PolicySettings",
    "Reason",
    "Shortfall",
    "Snapshot",
    "decide",
    "is_usable",
    "lack_of_path",
]


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


UNTRIED = 1.25
"""A path of which nothing is known yet is taken to cost as little as the best one, if its guess is up to so many times
that: a worker that came back would have nothing to do while another idle one was measured to be a little cheaper."""
OVERDUE = 0.5
"""When so many times as many requests as explore one time have not, the next one does: chance alone might not try what
has become cheaper for hundreds."""
FALLBACKS = frozenset({Reason.PREFILL_MISSING, Reason.PAIR_EXCLUDED, Reason.PAIR_BROKEN})
"""Local because it could not be split."""


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
    readers = [d for d in decodes if not d.is_reading_enough]
    hosts = [c for c in usable if c.role is Role.UNIFIED] + ([] if wants_split else readers)

    pairs = [(p, d) for p in prefills for d in decodes if p.pairing == d.pairing]
    excluded = set(request.excluded_pairs)
    has_broken = any(d.broken_pairs for d in decodes)
    whole = [(p, d) for p, d in pairs if _is_whole(p, d)] if has_broken else pairs
    good = [(p, d) for p, d in whole if _pair_of(p, d) not in excluded] if excluded else whole
    scores = Scores(request, snapshot, settings)
    holder = _holder(request, members)
    if holder is not None:
        takers = [d for d in decodes if d.pairing == holder.pairing and _is_whole(holder, d)]
        held = [scores.held(holder, d) for d in takers if _pair_of(holder, d) not in excluded]
        if held:
            return _pick(request, held, snapshot, settings, reason=Reason.HELD)
    splits = scores.splits(good)
    if splits and (hosts or readers) and settings.is_weighing and request.model in snapshot.costs.measured:
        locals_ = [scores.local(c) for c in (*hosts, *readers)]
        return _cheaper(request, splits, locals_, snapshot, settings)
    if paths := splits + [scores.local(c) for c in hosts]:
        return _pick(request, paths, snapshot, settings)
    if pairs and not settings.may_fall_back(request):
        left = scores.splits(whole or pairs)
        return _pick(request, left, snapshot, settings, reason=Reason.ONLY_PAIR_LEFT)
    if ends := {d.address.worker_id: d for _, d in pairs if not d.is_reading_enough}.values():
        reason = Reason.PAIR_EXCLUDED if len(whole) == len(pairs) else Reason.PAIR_BROKEN
        return _pick(request, [scores.local(d) for d in ends], snapshot, settings, reason=reason)
    is_missing = not prefills and _is_prefill_missing(request, members, snapshot)
    if readers and is_missing and settings.may_fall_back(request):
        locals_ = [scores.local(d) for d in readers]
        return _pick(request, locals_, snapshot, settings, reason=Reason.PREFILL_MISSING)
    return shortfall(request, members, needed_roles(request.model, snapshot, wants_split=wants_split), settings)


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
    costs = [settings.weights.cost_s(way.prediction) for way in ways]
    best = 0 if costs[0] <= costs[1] else 1
    weighed = [
        replace(way, prediction=replace(way.prediction, cost_s=cost_s)) for way, cost_s in zip(ways, costs, strict=True)
    ]
    num_without = snapshot.num_since.get((request.model, ways[1 - best].path.mode), 0)
    is_overdue = settings.explore * num_without >= OVERDUE
    is_exploring = is_overdue or explores(request.request_id, share=settings.explore, seed=settings.seed)
    if is_exploring and request.attempt == 1 and costs[1 - best] <= WORST * costs[best]:
        return weighed[1 - best].over(weighed[best], Reason.EXPLORED)
    if best == 1:
        return weighed[1].over(weighed[0], Reason.LOCAL_CHEAPER)
    return ways[0] if len(splits) > 1 else weighed[0].over(weighed[1], Reason.SPLIT_CHEAPER)


def _pick(
    request: PlaceRequest,
    paths: Sequence[Path],
    snapshot: Snapshot,
    settings: PolicySettings,
    *,
    reason: Reason | None = None,
) -> Choice:
    costs = [0.0] * len(paths) if settings.policy == "round_robin" else [path.cost_s for path in paths]
    best = _cheapest(paths, costs)
    if settings.policy != "round_robin":
        best = _untried(paths, best) or best
    second = None
    if len(paths) > 1:
        second = _cheapest(
            paths, [float("inf") if path is best else cost for path, cost in zip(paths, costs, strict=True)]
        )
    if reason is None:
        reason = _reason(paths, best, second, settings)
    return Choice(
        path=best,
        reason=reason,
        prediction=_predict(request, best, snapshot),
        runner_up=second,
        runner_up_prediction=_predict(request, second, snapshot) if second is not None else Prediction(),
    )


def _cheapest(paths: Sequence[Path], costs: Sequence[float]) -> Path:
    """Among equals the one that was chosen least often."""
    least = min(costs)
    equals = [path for path, cost in zip(paths, costs, strict=True) if cost == least]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda path: (path.num_placed, path.names))


def _untried(paths: Sequence[Path], best: Path) -> Path | None:
    """The cheapest of those that are to be tried before ``best``."""
    if best.is_untried:
        return None
    limit = UNTRIED * best.cost_s
    new = [p for p in paths if p.is_untried and p.cost_s <= limit and p.saved_s >= best.saved_s]
    return min(new, key=lambda path: (path.cost_s, path.names), default=None)


def _reason(paths: Sequence[Path], best: Path, second: Path | None, settings: PolicySettings) -> Reason:
    """Why the best one, where no failure decided."""
    if second is None:
        return Reason.ONLY_PATH
    if settings.policy == "round_robin":
        return Reason.ROUND_ROBIN
    if best.saved_s > 0 and _cheapest(paths, [path.cost_s + path.saved_s for path in paths]) is not best:
        return Reason.CACHED_PREFIX
    return Reason.LEAST_USED if second.cost_s <= best.cost_s else Reason.LEAST_LOADED


def _predict(request: PlaceRequest, path: Path, snapshot: Snapshot) -> Prediction:
    """Times are zero where nothing was measured yet, and where nothing is computed."""
    num_tokens, num_cached = request.num_prompt_tokens, path.num_cached_tokens
    num_kept = 0
    if path.prefill is not None:
        num_kept = num_cached_tokens(path.decode, num_tokens, snapshot)
    if path.is_held or request.model not in snapshot.costs.measured:
        predicted = Prediction(num_cached_tokens=num_cached, num_kept_tokens=num_kept)
    elif path.prefill is None:
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
    return replace(predicted, cost_s=path.cost_s)


# -- filters ----------------------------------------------------------------------------------------------------------


def _pair_of(prefill: Candidate, decode: Candidate) -> tuple[WorkerId, Incarnation, WorkerId, Incarnation]:
    p, d = prefill.address, decode.address
    return p.worker_id, p.incarnation, d.worker_id, d.incarnation


def _holder(request: PlaceRequest, members: Iterable[Candidate]) -> Candidate | None:
    """Who holds what the request asks for, if it is there still. A worker that drains waits for its leases to end."""
    held, there = request.held, (WorkerState.READY, WorkerState.DRAINING)
    if held is None:
        return None
    return next(
        (c for c in members if c.address == held.holder and c.state in there and not is_excluded(c, request)), None
    )


def _is_prefill_missing(request: PlaceRequest, members: Iterable[Candidate], snapshot: Snapshot) -> bool:
    """It is not only starting anew, or those that are there have failed this request."""
    has_failed = any(c.role is Role.PREFILL and is_excluded(c, request) for c in members)
    return has_failed or (request.model, Role.PREFILL) in snapshot.absent


def _is_whole(prefill: Candidate, decode: Candidate) -> bool:
    return prefill.key not in decode.broken_pairs
