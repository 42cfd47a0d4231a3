"""What the policy decides from: every worker as it is now, and the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.ids import Incarnation, WorkerId
from core.types import Mode, PlaceRequest, Role, WorkerAddress, WorkerState
from router.break_even import Weights
from router.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker as the policy sees it: what it is, how it is judged, and its load with the router's estimates."""

    address: WorkerAddress
    role: Role
    state: WorkerState
    model: str
    pairing: tuple[str, str]
    """Hand-offs are between equal ones only."""
    num_blocks: int
    block_size: int
    max_sequences: int
    max_step_tokens: int
    block_bytes: int = 0
    used_blocks: int = 0
    """Blocks that nobody else can have: in custody, in use, leased or promised."""
    queued_prompt_tokens: int = 0
    """Not computed yet, as far as can be known."""
    num_requests: int = 0
    """Running and waiting."""
    num_placed: int = 0
    """Placements ever made on this incarnation; breaks ties."""
    held_blocks: int = 0
    """Of the used ones, those that a prefill worker holds for decode workers."""
    num_transfers: int = 0
    """Hand-offs that a decode worker fetches now. They take turns."""
    promised_blocks: int = 0
    """Of a decode worker: for all that was placed on it and has not ended, whether or not it has given them yet."""
    is_refusing: bool = False
    """It has refused a request for lack of room since its last report."""
    is_reading_enough: bool = False
    """A decode worker that is given no prompt to read now, but may be handed one that another has read."""
    place: tuple[str, str, str] = ("", "", "")
    """Zone, rack, host; empty where unknown."""
    broken_pairs: frozenset[tuple[WorkerId, Incarnation]] = frozenset()
    """Prefill workers from which this decode worker takes nothing now."""

    @property
    def key(self) -> tuple[WorkerId, Incarnation]:
        return self.address.worker_id, self.address.incarnation

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
    num_since: Mapping[tuple[str, Mode], int] = field(default_factory=dict)
    """Placements of a model since the last one in this mode."""
    absent: frozenset[tuple[str, Role]] = frozenset()
    """Of ``pools``, those without a ready worker for longer than a start takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    mode: Literal["auto", "split", "local"] = "auto"
    policy: Literal["prefix_aware", "round_robin"] = "prefix_aware"
    projected_tokens: int = 256
    """Answer length assumed when the caller allows more."""
    weights: Weights = field(default_factory=Weights)
    held_fraction: float = 1.0
    """Share of a prefill worker's blocks that may be held for decode workers."""
    distance_s: float = 0.005
    """What each level that a pair is apart costs: another host, another rack, another zone."""
    explore: float = 0.0
    """Share of requests that explore; ``seed`` and their id say which, and one does when many have gone without."""
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
