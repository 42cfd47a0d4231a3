"""Whether a worker has room for one more request now, or the request had better wait at the router.

Beyond this point work queues up inside workers, where nobody weighs tenants and classes any more, and where what was
computed waits for somebody to take it. So a prefill worker is given no more than ``prefill_backlog_s`` of prompts
ahead, and nothing while decode workers do not take what it holds; and a decode worker nothing that its KV blocks or its
batch have no place for: prefill is held back when decode is the bottleneck. An empty worker always has room, and one
that holds a part of the prompt has more: a request may wait there for as long as that spares. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.priority import PriorityClass
from core.types import PlaceRequest, Role
from router.costs import Costs, num_pairs
from router.policy import Candidate, Path, PolicySettings, Snapshot, is_usable
from router.scores import num_cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    prefill_backlog_s: float = 1.0
    """Twice as much of the high class: where the pool's ``policy`` is ``priority``, it does not wait for the others
    there."""
    decode_backlog: float = 0.5
    """Requests beyond a decode worker's batch and blocks, as a share of them: their prompts are computed meanwhile, and
    whoever ends is followed at once."""
    held_fraction: float = 0.9
    """Quota of a prefill worker for KV that waits to be taken."""
    max_transfers: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The question for one request."""

    request: PlaceRequest
    snapshot: Snapshot
    settings: PolicySettings
    limits: RoomLimits

    def has_path(self, path: Path) -> bool:
        """Whether every worker of the path has room for its part. What is held already needs none where it is."""
        if path.prefill is None:
            return not self.lacks(path.decode, reads=True)
        return not self.lacks(path.decode) and (path.is_held or not self.lacks(path.prefill))

    def narrowed(self) -> Snapshot:
        """The snapshot of those who have room (and of whoever holds what is asked for), each for what it has room
        for."""
        held = self.request.held
        is_local = self.settings.mode == "local" or (self.request.model, Role.PREFILL) not in self.snapshot.pools
        roomy: list[Candidate] = []
        for each in self.snapshot.candidates:
            if each.model != self.request.model:
                continue
            if held is not None and each.address == held.holder:
                roomy.append(each)
            elif not self.lacks(each, reads=is_local):
                is_full = each.role is Role.DECODE and bool(self.lacks(each, reads=True))
                roomy.append(replace(each, is_reading_enough=True) if is_full else each)
        return replace(self.snapshot, candidates=tuple(roomy))

    def message(self) -> str:
        """Which workers lack what."""
        whole = {c.address.worker_id: self.lacks(c) for c in self.snapshot.candidates if is_usable(c, self.request)}
        parts = [f"{name} {lack}" for name, lack in whole.items() if lack]
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        return f"model {self.request.model!r} has no room now: {'; '.join(parts[:3])}{more}"

    def lacks(self, worker: Candidate, *, reads: bool = False) -> str:
        """What a worker has too much of already; empty where it has room. ``reads``: it is to compute the prompt."""
        if worker.num_requests == 0 and worker.used_blocks == 0 and not worker.is_refusing:
            return ""
        return next(self._lacks(worker, reads=reads), "")

    def _spared_s(self, worker: Candidate) -> float:
        """What the prompt would take elsewhere, and does not take there for what the worker holds of it."""
        num_cached = num_cached_tokens(worker, self.request.num_prompt_tokens, self.snapshot)
        if not num_cached:
            return 0.0
        law = self.snapshot.costs.of(worker.address)
        return law.prompt_s(num_cached, num_pairs(num_cached, 0))

    def _lacks(self, worker: Candidate, *, reads: bool) -> Iterator[str]:
        limits, num_tokens = self.limits, self.request.num_prompt_tokens
        more = 2 if PriorityClass.of(self.request.priority) is PriorityClass.HIGH else 1
        if worker.is_refusing:
            yield "has just refused a request"
        if worker.role is Role.PREFILL or worker.role is Role.UNIFIED or reads:
            backlog_s = prefill_backlog_s(worker, self.snapshot.costs)
            most_s = limits.prefill_backlog_s * more + self._spared_s(worker)
            if backlog_s > most_s:
                yield f"has {backlog_s:.1f} s of prompts to read ({most_s:g} s may wait there)"
        if worker.role is Role.PREFILL:
            quota = int(limits.held_fraction * worker.num_blocks)
            if worker.num_requests > 1 and worker.held_blocks + worker.blocks_for(num_tokens) > quota:
                yield f"holds {worker.held_blocks} of {quota} blocks for decode workers"
            return
        projected = num_tokens + min(self.request.max_new_tokens, self.settings.projected_tokens)
        needed = min(worker.blocks_for(projected), worker.num_blocks)
        taken, blocks = max(worker.used_blocks, worker.promised_blocks), worker.num_blocks
        if taken + needed > blocks + int(more * limits.decode_backlog * blocks):
            yield f"has promised {taken} KV blocks of {blocks}"
        most = worker.max_sequences + int(more * limits.decode_backlog * worker.max_sequences)
        if worker.num_requests >= most:
            yield f"has {worker.num_requests} requests ({worker.max_sequences} run at once)"
        if worker.num_transfers >= limits.max_transfers:
            yield f"has {worker.num_transfers} transfers in flight"


def prefill_backlog_s(worker: Candidate, costs: Costs) -> float:
    """Seconds of prompts that a worker has to read already; 0 while nothing was measured."""
    num_tokens = worker.queued_prompt_tokens
    if not num_tokens or worker.model not in costs.measured:
        return 0.0
    law = costs.of(worker.address)
    num_steps = -(-num_tokens // min(law.max_step_tokens, worker.max_step_tokens))
    return num_steps * law.fixed_s + law.prompt_s(num_tokens, 0)
