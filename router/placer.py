"""Places one request on the cell as it is now: snapshot, policy, reservation. Never waits."""

from collections.abc import Mapping
from dataclasses import replace

from core.errors import ModelNotFound
from core.ids import new_handoff_id, new_placement_id
from core.tickets import TicketOffice
from core.types import (
    ClusterView,
    ModelRecord,
    Placement,
    PlaceRequest,
    WorkerState,
)
from router.absences import Absences
from router.cost_book import CostBook
from router.load import LoadBook
from router.policy import (
    FALLBACKS,
    Choice,
    Lack,
    Path,
    PolicySettings,
    Reason,
    Shortfall,
    Snapshot,
    decide,
    lack_of_path,
)
from router.pools import PoolBook
from router.prefix_index import PrefixIndex, WorkerKey
from router.registry import Registry
from router.room import Room, RoomLimits

MAKESHIFT = FALLBACKS | {Reason.ONLY_PAIR_LEFT}
"""Ways of doing it that are taken only where the pairs cannot be had."""
CONFIRM_S = 5.0
"""After the moment at which its prompt should be computed, a worker may take so long to report the blocks of it ..."""
CONFIRM_FACTOR = 2.0
"""... and so many times as long as predicted to compute it."""


class Placer:
    """The shell around the pure policy."""

    def __init__(
        self,
        *,
        registry: Registry,
        load: LoadBook,
        prefixes: PrefixIndex,
        costs: CostBook,
        pools: PoolBook,
        absences: Absences,
        settings: PolicySettings,
        room_limits: RoomLimits,
        office: TicketOffice | None = None,
    ) -> None:
        self._registry = registry
        self._load = load
        self._prefixes = prefixes
        self._costs = costs
        self._pools = pools
        self._absences = absences
        self._settings = settings
        self._room_limits = room_limits
        self._office = office

    def snapshot(self, request: PlaceRequest | None = None) -> Snapshot:
        """Everything the policy may know now."""
        workers = self._registry.workers()
        wanted = {(pool.model, pool.role) for pool in self._pools.sizes() if pool.replicas > 0}
        present = {(w.registration.model.name, w.registration.role) for w in workers if w.state is not WorkerState.LOST}
        pools, costs = frozenset(wanted | present), self._costs.costs()
        return Snapshot(
            candidates=self._load.candidates(workers, costs),
            pools=pools,
            absent=self._absences.look(pools, workers),
            overlaps=self._prefixes.overlaps(request.block_hashes) if request is not None else {},
            costs=costs,
            num_since=self._load.num_since,
        )

    def place_now(self, request: PlaceRequest) -> Placement | Shortfall:
        """A placement with its reservation made, or what is missing. Raises ModelNotFound."""
        self.check_model(request.model)
        snapshot = self.snapshot(request)
        choice = self._choose(request, snapshot)
        if isinstance(choice, Shortfall):
            return choice
        path = choice.path
        placement = Placement(
            placement_id=new_placement_id(),
            handoff_id=request.held.handoff_id if path.is_held and request.held is not None else new_handoff_id(),
            mode=path.mode,
            decode=path.decode.address,
            prefill=path.prefill.address if path.prefill is not None else None,
            is_held=path.is_held,
            prediction=choice.prediction,
            runner_up=str(choice.runner_up) if choice.runner_up is not None else "",
            runner_up_prediction=choice.runner_up_prediction,
            reason=choice.reason,
        )
        placement = self._with_ticket(placement, request)
        self._load.reserve(placement.placement_id, request, path)
        self._expect_prefix(request, path, snapshot.overlaps, placement.prediction.ttft_s)
        return placement

    def _with_ticket(self, placement: Placement, request: PlaceRequest) -> Placement:
        """Where something is handed off, and tickets are asked for."""
        if self._office is None or placement.prefill is None:
            return placement
        ticket = self._office.sign_claim(
            placement.decode,
            placement.prefill,
            handoff_id=placement.handoff_id,
            request_id=request.request_id,
            attempt=request.attempt,
            tenant=request.tenant,
            deadline_s=request.deadline_s,
        )
        return replace(placement, ticket=ticket)

    def _choose(self, request: PlaceRequest, snapshot: Snapshot) -> Choice | Shortfall:
        """The best path of all, if it has room; else the best of those that have."""
        choice = decide(request, snapshot, self._settings)
        room = Room(request=request, snapshot=snapshot, settings=self._settings, limits=self._room_limits)
        if isinstance(choice, Shortfall) or room.has_path(choice.path):
            return choice
        other = decide(request, room.narrowed(), self._settings)
        # Not a way of doing it that is taken only where the pairs are broken: theirs are well, and busy.
        if isinstance(other, Choice) and room.has_path(other.path) and other.reason not in MAKESHIFT - {choice.reason}:
            return other
        return Shortfall(lack=Lack.NO_ROOM, message=room.message(), ttft_s=choice.prediction.ttft_s)

    def _expect_prefix(
        self, request: PlaceRequest, path: Path, overlaps: Mapping[WorkerKey, int], ttft_s: float
    ) -> None:
        """The prompt's blocks will be with both workers: a burst with one new prefix is not scattered."""
        readers = (path.decode,) if path.prefill is None or path.is_held else (path.prefill, path.decode)
        new = request.block_hashes[min(overlaps.get(worker.key, 0) for worker in readers) :]
        self._prefixes.expect([worker.key for worker in readers], new, for_s=CONFIRM_FACTOR * ttft_s + CONFIRM_S)

    def check_model(self, name: str) -> None:
        """A model is known when it is configured (its workers may still come) or when a worker serves it."""
        if self._pools.has_model(name):
            return
        known = self.model_names()
        if name not in known:
            raise ModelNotFound(
                f"model {name!r} is not served here; served: {', '.join(known) or 'none'}", param="model"
            )

    def model_names(self) -> list[str]:
        """Configured models in their order, then those that only workers know."""
        configured = dict.fromkeys(pool.model for pool in self._pools.sizes())
        return list(configured | dict.fromkeys(record.name for record in self._registry.models()))

    def view(self) -> ClusterView:
        """What gateways need to know: the models' records, and whether each has a path now."""
        snapshot = self.snapshot()
        usable = []
        for name in self.model_names():
            reason = lack_of_path(name, snapshot, self._settings)
            usable.append((name, reason == "", reason))
        return ClusterView(models=self.models(), usable=tuple(usable))

    def models(self) -> tuple[ModelRecord, ...]:
        return self._registry.models()
