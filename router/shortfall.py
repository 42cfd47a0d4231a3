"""Which workers may serve a request at all, and in which words it is said that none may. Pure functions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.types import PlaceRequest, Role, WorkerState
from router.snapshot import Candidate, PolicySettings, Snapshot


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
class Shortfall:
    """No path now. ``message`` names the model and the missing role and what there is instead."""

    lack: Lack
    message: str
    ttft_s: float = 0.0
    """Predicted, from the moment of placing, where there is a path."""


def is_usable(candidate: Candidate, request: PlaceRequest) -> bool:
    """Ready, not blamed, and large enough for the prompt and one token."""
    return (
        candidate.state is WorkerState.READY
        and not is_excluded(candidate, request)
        and _can_hold(candidate, request.num_prompt_tokens)
    )


def is_excluded(candidate: Candidate, request: PlaceRequest) -> bool:
    return candidate.key in request.excluded_workers


def _can_hold(candidate: Candidate, num_prompt_tokens: int) -> bool:
    return candidate.blocks_for(num_prompt_tokens + 1) <= candidate.num_blocks


def needed_roles(model: str, snapshot: Snapshot, *, wants_split: bool) -> tuple[Role, ...]:
    """The roles that a path of ``model`` is made of, in the order of the request."""
    here = {role for name, role in snapshot.pools if name == model} | {
        c.role for c in snapshot.candidates if c.model == model
    }
    if wants_split:
        return (Role.PREFILL, Role.DECODE)
    return tuple(role for role in (Role.DECODE, Role.UNIFIED) if role in here) or (Role.DECODE,)


def shortfall(
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
        if c.state is WorkerState.READY and is_excluded(c, request)
        else "too small"
        if c.state is WorkerState.READY
        else str(c.state)
        for c in workers
    )
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none registered"
