"""What became of the pairs that this worker is one side of: counters for people, circuits for the router.

Counters are by peer and safe from any thread; circuits are by incarnation and the event loop's. What is remembered is
bounded: of ``_MAX_PEERS`` peers, the one that was idle longest makes way, and its counters are added to ``OTHER``.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from core.ids import Incarnation, WorkerId
from kvtransfer.circuit import Circuit, CircuitSettings

OTHER = WorkerId("other")
"""Stands for all peers that are not remembered by name."""
_MAX_PEERS = 64
_DEFAULT = CircuitSettings()


@dataclass(slots=True)
class PairCounts:
    """Totals since start."""

    num_bytes: int = 0
    """Of KV that arrived (at D), or that was released as arrived (at P)."""
    num_ops: int = 0
    """Operations that are terminal, slot reads included."""
    num_handoffs: int = 0
    """Begun."""
    num_retries: int = 0
    """Of those, for a request that had failed before."""
    num_descriptors: int = 0
    """Of those operations, where the backend tells."""
    post_s: float = 0.0
    """Spent in posting them."""
    move_s: float = 0.0
    """Until they were seen to be over, but for posting."""
    failures: Counter[str] = field(default_factory=Counter)
    """Hand-offs and handshakes that failed, by slug."""

    def add(self, other: "PairCounts") -> None:
        self.num_bytes += other.num_bytes
        self.num_ops += other.num_ops
        self.num_handoffs += other.num_handoffs
        self.num_retries += other.num_retries
        self.num_descriptors += other.num_descriptors
        self.post_s += other.post_s
        self.move_s += other.move_s
        self.failures += other.failures


class Pairs:
    def __init__(self, settings: CircuitSettings = _DEFAULT) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._counts: OrderedDict[WorkerId, PairCounts] = OrderedDict()
        self._circuits: OrderedDict[WorkerId, tuple[Incarnation, Circuit]] = OrderedDict()

    # -- counters, from any thread ------------------------------------------------------------------------------------

    def count(self, peer: WorkerId, **more: float) -> None:
        """Add to the fields of the peer's :class:`PairCounts`, by name."""
        with self._lock:
            counts = self._of(peer)
            for name, number in more.items():
                setattr(counts, name, getattr(counts, name) + number)

    def count_failure(self, peer: WorkerId, slug: str) -> None:
        with self._lock:
            self._of(peer).failures[slug] += 1

    def counts(self) -> dict[WorkerId, PairCounts]:
        """A copy."""
        copies: dict[WorkerId, PairCounts] = {}
        with self._lock:
            for peer, counts in self._counts.items():
                copies[peer] = PairCounts()
                copies[peer].add(counts)
        return copies

    def _of(self, peer: WorkerId) -> PairCounts:
        counts = self._counts.setdefault(peer, PairCounts())
        self._counts.move_to_end(peer)
        named = len(self._counts) - (OTHER in self._counts)
        if named > _MAX_PEERS:
            idle = next(each for each in self._counts if each != OTHER)
            gone = self._counts.pop(idle)
            self._counts.setdefault(OTHER, PairCounts()).add(gone)
        return counts

    # -- circuits, on the event loop ----------------------------------------------------------------------------------

    def circuit(self, peer: WorkerId, incarnation: Incarnation) -> Circuit:
        """That of the pair with this incarnation. A new one begins closed, and takes the place of the old one."""
        known = self._circuits.get(peer)
        if known is None or known[0] != incarnation:
            self._circuits[peer] = known = (incarnation, Circuit(self._settings))
        self._circuits.move_to_end(peer)
        if len(self._circuits) > _MAX_PEERS:
            self._circuits.popitem(last=False)
        return known[1]

    def forget_circuit(self, peer: WorkerId, circuit: Circuit) -> None:
        """The worker does not come back under this incarnation."""
        if self.is_current(peer, circuit):
            del self._circuits[peer]

    def is_current(self, peer: WorkerId, circuit: Circuit) -> bool:
        known = self._circuits.get(peer)
        return known is not None and known[1] is circuit

    def circuits(self) -> dict[WorkerId, Circuit]:
        return {peer: circuit for peer, (_, circuit) in self._circuits.items()}

    def broken(self) -> tuple[tuple[WorkerId, Incarnation], ...]:
        """Peers with which nothing is to be begun now."""
        return tuple(
            (peer, incarnation) for peer, (incarnation, circuit) in self._circuits.items() if not circuit.is_closed
        )
