"""What workers will have to do: their own reports, and the router's estimates for what they cannot have reported yet.

A worker's report is the truth about everything that has reached it. A placement made since (or just before) that report
is not in it; the router adds an estimate until a later report covers it, its end is reported, or it expires. What
should have been read since is taken off (router/progress.py). Estimates are lost harmlessly: when the router restarts,
the next reports replace them.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from core.clock import Clock
from core.ids import GatewayId, Incarnation, PlacementId, RequestId, WorkerId
from core.types import Mode, PlaceRequest, Role, WorkerAddress, WorkerRegistration, WorkerStatus
from router.break_even import queue_s
from router.costs import Costs
from router.policy import Candidate, Path
from router.progress import Progress

ARRIVAL_S = 0.1
"""A request placed this long before a report may still have been on its way to the worker."""
EXPIRY_MARGIN_S = 5.0
"""An estimate outlives its request's deadline by this; by then the request has ended, reported or not."""
TOLD_S = 0.03
"""An end is told so long after the worker has seen it: a report in between does not contain what has ended."""

NUM_GRADES = 50
"""What is left of a queue is told in so many grades."""

WorkerKey = tuple[WorkerId, Incarnation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The estimate that one placement leaves behind."""

    placement_id: PlacementId
    attempt: tuple[RequestId, int]
    """Of a request, by its number."""
    gateway: tuple[GatewayId, Incarnation]
    prefill: WorkerKey
    """Who reads the prompt: P, or in ``local`` mode the worker itself. Of what is held already nobody does, and its
    blocks are in P's own report: then it is the decode worker too."""
    decode: WorkerKey
    num_decode_blocks: int
    """Its prompt and assumed answer at the decode worker."""
    account: tuple[str, str, int]
    """(model, tenant, priority): who is charged for it, for ..."""
    num_tokens: int
    """... a prompt of so many tokens, wherever it is read, and ..."""
    num_projected: int
    """... an answer of so many."""
    expires_at: float


class _Share(NamedTuple):
    """What one placement, or several, will be to one worker."""

    placed_at: float
    queued_prompt_tokens: int
    blocks: int
    num_requests: int

    def plus(self, other: "_Share", sign: int) -> "_Share":
        return _Share(
            0.0,
            self.queued_prompt_tokens + sign * other.queued_prompt_tokens,
            self.blocks + sign * other.blocks,
            self.num_requests + sign * other.num_requests,
        )


_NOTHING = _Share(0.0, 0, 0, 0)


@dataclass(slots=True)
class _Extra:
    """What reservations add to one worker's report: those that the report may not contain, and their sum."""

    shares: dict[PlacementId, _Share] = field(default_factory=dict)
    """In the order of their making."""
    ended: deque[_Share] = field(default_factory=deque)
    """What the report contains still although it is over, by the time at which that was told."""
    sum: _Share = _NOTHING
    """The first less the second."""

    def add(self, placement_id: PlacementId, share: _Share) -> None:
        self.shares[placement_id] = share
        self.sum = self.sum.plus(share, 1)

    def remove(self, placement_id: PlacementId) -> None:
        share = self.shares.pop(placement_id, None)
        if share is not None:
            self.sum = self.sum.plus(share, -1)

    def end(self, share: _Share) -> None:
        """What the report contains is over; ``placed_at`` is now."""
        self.ended.append(share)
        self.sum = self.sum.plus(share, -1)

    def cover(self, reported_at: float) -> None:
        """The report contains what had come by then, and nothing that had ended."""
        while self.shares:
            first = next(iter(self.shares))
            if self.shares[first].placed_at >= reported_at - ARRIVAL_S:
                break
            self.remove(first)
        while self.ended and self.ended[0].placed_at <= reported_at + TOLD_S:
            self.sum = self.sum.plus(self.ended.popleft(), 1)


class _Known(NamedTuple):
    """A candidate and what it was made of."""

    worker: WorkerStatus
    extra: _Share
    num_placed: int
    candidate: Candidate


class _Shown(NamedTuple):
    """What was made of a candidate whose worker reads."""

    told: Candidate
    costs: Costs
    per_s: float
    """Tokens of prompts, by these costs."""
    candidate: Candidate


class LoadBook:
    """The reservations, by placement. Used by one event loop."""

    def __init__(self, clock: Clock, *, projected_tokens: int) -> None:
        self._clock = clock
        self._projected_tokens = projected_tokens
        self._reservations: dict[PlacementId, Reservation] = {}
        self._num_placed: dict[WorkerKey, int] = defaultdict(int)
        self._extras: dict[WorkerKey, _Extra] = defaultdict(_Extra)
        self._known: dict[WorkerKey, _Known] = {}
        """Most workers are as they were at the last decision."""
        self._progress: dict[WorkerKey, Progress] = {}
        self._shown: dict[WorkerKey, _Shown] = {}
        self._refused_at: dict[WorkerKey, float] = {}
        self.num_since: dict[tuple[str, Mode], int] = defaultdict(int)
        """Placements of a model since the last one in this mode."""
        self._promised: dict[WorkerKey, int] = defaultdict(int)
        """Blocks at decode workers of all open placements."""

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, placement_id: PlacementId, request: PlaceRequest, path: Path) -> None:
        """Note a placement just made."""
        now = self._clock.now()
        decode = path.decode.key
        prefill = path.prefill.key if path.prefill is not None and not path.is_held else decode
        num_new = 0 if path.is_held else request.num_prompt_tokens - path.num_cached_tokens
        num_projected = request.num_prompt_tokens + min(request.max_new_tokens, self._projected_tokens)
        self._reservations[placement_id] = Reservation(
            placement_id=placement_id,
            attempt=(request.request_id, request.attempt),
            gateway=(request.gateway_id, request.gateway_incarnation),
            prefill=prefill,
            decode=decode,
            num_decode_blocks=path.decode.blocks_for(num_projected),
            account=(request.model, request.tenant, request.priority),
            num_tokens=request.num_prompt_tokens,
            num_projected=num_projected - request.num_prompt_tokens,
            expires_at=now + request.deadline_s + EXPIRY_MARGIN_S,
        )
        self._promised[decode] += path.decode.blocks_for(num_projected)
        reads_here = num_new if prefill == decode else 0
        self._extras[decode].add(placement_id, _Share(now, reads_here, path.decode.blocks_for(num_projected), 1))
        if path.prefill is not None and prefill != decode:
            num_blocks = path.prefill.blocks_for(request.num_prompt_tokens)
            self._extras[prefill].add(placement_id, _Share(now, num_new, num_blocks, 1))
        if prefill in self._progress:
            self._progress[prefill].left += num_new
        for key in {prefill, decode}:
            self._num_placed[key] += 1
        for mode in Mode:
            self.num_since[request.model, mode] = 0 if mode is path.mode else self.num_since[request.model, mode] + 1

    def release(self, placement_id: PlacementId, *, was_refused: bool = False) -> Reservation | None:
        """The placement is over. None if it was not known (any more): harmless, a repeated or late report.

        ``was_refused``: for lack of room, which its workers' next reports will show; until then they have none.
        """
        reservation = self._reservations.pop(placement_id, None)
        if reservation is None:
            return None
        now, prefill, decode = self._clock.now(), reservation.prefill, reservation.decode
        self._promised[decode] -= reservation.num_decode_blocks
        if was_refused:
            self._refused_at |= {prefill: now, decode: now}
        elif decode in self._extras and placement_id not in self._extras[decode].shares:
            self._extras[decode].end(_Share(now, 0, reservation.num_decode_blocks, 1))
        for key in (prefill, decode):
            if key in self._extras:
                self._extras[key].remove(placement_id)
        return reservation

    def of_attempt(self, request_id: RequestId, attempt: int) -> list[PlacementId]:
        """What is placed for it."""
        return [r.placement_id for r in self._reservations.values() if r.attempt == (request_id, attempt)]

    def release_gateway(self, gateway_id: GatewayId, incarnation: Incarnation) -> int:
        """This incarnation of a gateway is gone: its requests are being aborted by the workers. Returns how many."""
        gone = [r.placement_id for r in self._reservations.values() if r.gateway == (gateway_id, incarnation)]
        for placement_id in gone:
            self.release(placement_id)
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
            self.release(placement_id)
        for book in (
            self._num_placed,
            self._extras,
            self._known,
            self._progress,
            self._shown,
            self._refused_at,
            self._promised,
        ):
            for key in book.keys() - living:
                del book[key]
        return len(gone)

    def candidates(self, workers: Iterable[WorkerStatus], costs: Costs) -> tuple[Candidate, ...]:
        """The policy's view: reports with what they cannot contain yet, without what has been read since."""
        now = self._clock.now()
        return tuple(self._less_read(worker, self._told(worker, now), costs, now) for worker in workers)

    def _less_read(self, worker: WorkerStatus, told: Candidate, costs: Costs, now: float) -> Candidate:
        """A candidate is made anew only when what is left has changed by much: most decisions find it as it was."""
        if told.model not in costs.measured:
            return told
        told_at, num_known = now - worker.heartbeat_age_s, told.queued_prompt_tokens
        progress = self._progress.get(told.key)
        if progress is None:
            progress = self._progress[told.key] = Progress(at=told_at, report=worker.load, left=num_known)
        if not num_known:
            progress.idle(worker.load, now=now)
            return told
        shown = self._shown.get(told.key)
        if shown is None or shown.told is not told or shown.costs is not costs:
            num_rows = 0 if told.role is Role.PREFILL else told.num_requests
            per_s = num_known / queue_s(costs, told, num_rows=num_rows)
            last = shown.candidate if shown is not None and shown.told is told else told
            shown = self._shown[told.key] = _Shown(told, costs, per_s, last)
        left = progress.look(
            worker.load,
            told_at=told_at,
            now=now,
            num_known=num_known,
            max_step_tokens=told.max_step_tokens,
            per_s=shown.per_s,
        )
        unit = max(1, num_known // NUM_GRADES)
        left = min(num_known, -(-left // unit) * unit)
        if shown.candidate.queued_prompt_tokens != left:
            candidate = told if left == num_known else replace(told, queued_prompt_tokens=left)
            shown = self._shown[told.key] = shown._replace(candidate=candidate)
        return shown.candidate

    def _told(self, worker: WorkerStatus, now: float) -> Candidate:
        registration, load = worker.registration, worker.load
        key = (registration.worker_id, registration.incarnation)
        num_placed, extra = self._num_placed.get(key, 0), _NOTHING
        if key in self._extras:
            self._extras[key].cover(now - worker.heartbeat_age_s)
            extra = self._extras[key].sum
        is_refusing = self._refused_at.get(key, -1.0) > now - worker.heartbeat_age_s
        known = self._known.get(key)
        promised = self._promised.get(key, 0)
        same = (num_placed, extra, is_refusing, promised)
        if known is not None and same == (
            known.num_placed,
            known.extra,
            known.candidate.is_refusing,
            known.candidate.promised_blocks,
        ):
            before = known.worker
            if before.load is load and before.registration is registration and before.state is worker.state:
                return known.candidate
        blocks = load.blocks
        candidate = Candidate(
            address=address_of(worker),
            role=registration.role,
            state=worker.state,
            model=registration.model.name,
            pairing=registration.pairing,
            num_blocks=registration.num_blocks,
            block_size=registration.model.block_size,
            max_sequences=registration.max_sequences,
            max_step_tokens=registration.max_step_tokens,
            block_bytes=registration.block_bytes,
            used_blocks=max(0, blocks.custody + blocks.in_use + blocks.leased + blocks.reserved + extra.blocks),
            queued_prompt_tokens=load.queued_prompt_tokens + extra.queued_prompt_tokens,
            num_requests=max(0, load.num_running + load.num_waiting + extra.num_requests),
            num_placed=num_placed,
            held_blocks=load.held_bytes // max(1, registration.block_bytes),
            num_transfers=load.num_transfers,
            is_refusing=is_refusing,
            promised_blocks=promised,
            place=place_of(registration),
            broken_pairs=frozenset(load.broken_pairs),
        )
        self._known[key] = _Known(worker, extra, num_placed, candidate)
        return candidate


def place_of(registration: WorkerRegistration) -> tuple[str, str, str]:
    """Zone, rack and host, by its labels; without a label ``host`` it is where the process says it runs."""
    labels = dict(registration.labels)
    return labels.get("zone", ""), labels.get("rack", ""), labels.get("host", registration.hostname)


def address_of(worker: WorkerStatus) -> WorkerAddress:
    registration = worker.registration
    return WorkerAddress(
        worker_id=registration.worker_id, incarnation=registration.incarnation, address=registration.address
    )
