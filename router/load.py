"""What workers will have to do: their own reports, and the router's estimates for what they cannot have reported yet.

A worker's report is the truth about everything that has reached it. A placement made since (or just before) that report
is not in it; the router adds an estimate until a later report covers it, its end is reported, or it expires. Estimates
are lost harmlessly: when the router restarts, the next reports replace them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from core.clock import Clock
from core.ids import GatewayId, Incarnation, PlacementId, WorkerId
from core.types import PlaceRequest, Role, WorkerAddress, WorkerStatus
from router.policy import Candidate, Path

ARRIVAL_S = 0.25
"""A request placed this long before a report may still have been on its way to the worker."""
EXPIRY_MARGIN_S = 5.0
"""An estimate outlives its request's deadline by this; by then the request has ended, reported or not."""
RATE_MIN_TOKENS = 256
"""A prefill rate measured over fewer tokens says nothing."""

WorkerKey = tuple[WorkerId, Incarnation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The estimate that one placement leaves behind."""

    placement_id: PlacementId
    gateway: tuple[GatewayId, Incarnation]
    prefill: WorkerKey
    """Who reads the prompt: P, or in ``local`` mode the worker itself. Of what is held already nobody does, and its
    blocks are in P's own report: then it is the decode worker too."""
    decode: WorkerKey
    prompt_tokens: int
    new_tokens: int
    """Of the prompt, those that are not cached where it is read."""
    projected_tokens: int
    """Prompt and assumed answer."""
    placed_at: float
    expires_at: float


@dataclass(slots=True)
class _Extra:
    """What reservations add to one worker's report."""

    queued_prompt_tokens: int = 0
    blocks: int = 0
    num_requests: int = 0


class LoadBook:
    """The reservations, by placement. Used by one event loop."""

    def __init__(self, clock: Clock, *, projected_tokens: int) -> None:
        self._clock = clock
        self._projected_tokens = projected_tokens
        self._reservations: dict[PlacementId, Reservation] = {}
        self._num_placed: dict[WorkerKey, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, placement_id: PlacementId, request: PlaceRequest, path: Path) -> None:
        """Note a placement just made."""
        now = self._clock.now()
        decode = _key(path.decode)
        prefill = _key(path.prefill) if path.prefill is not None and not path.is_held else decode
        self._reservations[placement_id] = Reservation(
            placement_id=placement_id,
            gateway=(request.gateway_id, request.gateway_incarnation),
            prefill=prefill,
            decode=decode,
            prompt_tokens=0 if path.is_held else request.num_prompt_tokens,
            new_tokens=0 if path.is_held else request.num_prompt_tokens - path.num_cached_tokens,
            projected_tokens=request.num_prompt_tokens + min(request.max_new_tokens, self._projected_tokens),
            placed_at=now,
            expires_at=now + request.deadline_s + EXPIRY_MARGIN_S,
        )
        for key in {prefill, decode}:
            self._num_placed[key] += 1

    def release(self, placement_id: PlacementId) -> bool:
        """The placement is over. False if it was not known (any more): harmless, a repeated or late report."""
        return self._reservations.pop(placement_id, None) is not None

    def release_gateway(self, gateway_id: GatewayId, incarnation: Incarnation) -> int:
        """This incarnation of a gateway is gone: its requests are being aborted by the workers. Returns how many."""
        gone = [r.placement_id for r in self._reservations.values() if r.gateway == (gateway_id, incarnation)]
        for placement_id in gone:
            del self._reservations[placement_id]
        return len(gone)

    def expire(self, alive: Iterable[WorkerKey]) -> int:
        """Drop estimates whose request is over by its deadline, and everything about workers that are gone."""
        now, living = self._clock.now(), set(alive)
        gone = [
            r.placement_id
            for r in self._reservations.values()
            if r.expires_at <= now or (r.prefill not in living and r.decode not in living)
        ]
        for placement_id in gone:
            del self._reservations[placement_id]
        for key in [key for key in self._num_placed if key not in living]:
            del self._num_placed[key]
        return len(gone)

    def candidates(self, workers: Iterable[WorkerStatus]) -> tuple[Candidate, ...]:
        """The policy's view: reports with what they cannot contain yet."""
        workers = tuple(workers)
        now = self._clock.now()
        extras = self._extras(
            {
                (w.registration.worker_id, w.registration.incarnation): (
                    now - w.heartbeat_age_s - ARRIVAL_S,
                    w.registration.model.block_size,
                )
                for w in workers
            }
        )
        return tuple(self._candidate(worker, extras) for worker in workers)

    def _extras(self, reports: dict[WorkerKey, tuple[float, int]]) -> dict[WorkerKey, _Extra]:
        """``reports``: for each worker the moment up to which its report covers placements, and its block size."""
        extras: dict[WorkerKey, _Extra] = defaultdict(_Extra)
        oldest = min((covered for covered, _ in reports.values()), default=0.0)
        for r in reversed(self._reservations.values()):  # in the order of their making
            if r.placed_at < oldest:
                break
            if r.prefill in reports and r.placed_at >= reports[r.prefill][0]:
                extras[r.prefill].queued_prompt_tokens += r.new_tokens
                if r.prefill != r.decode:
                    extras[r.prefill].blocks += -(-r.prompt_tokens // reports[r.prefill][1])
                    extras[r.prefill].num_requests += 1
            if r.decode in reports and r.placed_at >= reports[r.decode][0]:
                extras[r.decode].blocks += -(-r.projected_tokens // reports[r.decode][1])
                extras[r.decode].num_requests += 1
        return extras

    def _candidate(self, worker: WorkerStatus, extras: dict[WorkerKey, _Extra]) -> Candidate:
        registration, load = worker.registration, worker.load
        key = (registration.worker_id, registration.incarnation)
        extra = extras.get(key) or _Extra()
        blocks = load.blocks
        return Candidate(
            address=address_of(worker),
            role=registration.role,
            state=worker.state,
            model=registration.model.name,
            format_hash=registration.model.format_hash,
            num_blocks=registration.num_blocks,
            block_size=registration.model.block_size,
            max_sequences=registration.max_sequences,
            max_step_tokens=registration.max_step_tokens,
            used_blocks=blocks.custody + blocks.in_use + blocks.leased + blocks.reserved + extra.blocks,
            queued_prompt_tokens=load.queued_prompt_tokens + extra.queued_prompt_tokens,
            num_requests=load.num_running + load.num_waiting + extra.num_requests,
            prefill_tokens_per_s=_prefill_rate(worker),
            num_placed=self._num_placed.get(key, 0),
            broken_pairs=frozenset(load.broken_pairs),
        )


def _key(candidate: Candidate) -> WorkerKey:
    return candidate.address.worker_id, candidate.address.incarnation


def address_of(worker: WorkerStatus) -> WorkerAddress:
    registration = worker.registration
    return WorkerAddress(
        worker_id=registration.worker_id, incarnation=registration.incarnation, address=registration.address
    )


def _prefill_rate(worker: WorkerStatus) -> float:
    """Tokens a second while busy, over the life of the incarnation. Only where steps hold nothing but prompts."""
    load = worker.load
    if (
        worker.registration.role is not Role.PREFILL
        or load.prompt_tokens_computed < RATE_MIN_TOKENS
        or load.busy_s <= 0
    ):
        return 0.0
    return load.prompt_tokens_computed / load.busy_s
