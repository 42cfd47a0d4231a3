"""Whether a worker may say that it is ready: a hand-off was tried out with a live peer, where there is one.

::

    before the router has answered --meet(no peers)-----------------> settled
       '--meet(peers)--> waiting --note(one of them, no error)------> settled
                           ^  '--meet(no peers): the last one died--> settled
                           '--note(error), meet(others)

A port that is open says nothing about memory that peers can read: a fleet whose workers were replaced could be ready in
every probe and fail every request. Once settled it stays so: pairs that break later are left alone by their circuits
(kvtransfer/circuit.py), and the router is told of them. WAITING has no time limit on purpose: it says why, and the
router uses others.
"""

from collections.abc import Callable

from core.ids import Incarnation, WorkerId
from core.types import WorkerAddress


class Proof:
    """One worker's. Event loop only."""

    def __init__(self) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        """Called once."""
        self._peers: dict[tuple[WorkerId, Incarnation], str] | None = None
        """What became of the last try with each."""
        self._is_settled = False

    @property
    def why_not(self) -> str | None:
        """None when it is settled, else what is missing, for people."""
        if self._is_settled:
            return None
        if self._peers is None:
            return "the router has not named the peers yet"
        tries = [f"{worker_id}: {error or 'not tried yet'}" for (worker_id, _), error in self._peers.items()]
        return f"no canary hand-off with a live peer has succeeded; {'; '.join(tries)}"

    def meet(self, peers: tuple[WorkerAddress, ...]) -> None:
        """The live workers of the other role."""
        before = self._peers or {}
        keys = [(peer.worker_id, peer.incarnation) for peer in peers]
        self._peers = {key: before.get(key, "") for key in keys}
        if not peers:
            self._settle()

    def note(self, worker_id: WorkerId, incarnation: Incarnation, error: str) -> None:
        """A canary was read, by this worker or by the peer; ``error`` says why it was not."""
        if not error:
            self._settle()
        elif self._peers is not None and (worker_id, incarnation) in self._peers:
            self._peers[worker_id, incarnation] = error

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self.on_settled()
