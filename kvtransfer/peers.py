"""Whom we have links to: at most one usable incarnation of each worker. Sans-I/O.

A new incarnation proves that the old process is gone: its link stops being usable at once, is *retired* (operations
on it are observed to their end) and only then disconnected. Incarnations are random, so "older" cannot be read from
them: one that was replaced is remembered and refused when it shows up again (a delayed message, a paused process that
wakes up).
"""

from collections import deque
from collections.abc import Callable

from core.errors import StaleIncarnation
from core.handoff import PeerInfo
from core.ids import Incarnation, WorkerId, format_incarnation
from kvtransfer.backends.base import Link

_REMEMBERED = 64
"""Replaced incarnations remembered for each worker."""


class Peers:
    """Used by the transfer thread only."""

    def __init__(self) -> None:
        self._links: dict[WorkerId, Link] = {}
        self._replaced: dict[WorkerId, deque[Incarnation]] = {}
        self._retired: list[Link] = []

    def find(self, peer: PeerInfo) -> Link | None:
        """The usable link to exactly this incarnation. Raises StaleIncarnation when the incarnation was replaced."""
        if peer.incarnation in self._replaced.get(peer.worker_id, ()):
            raise StaleIncarnation(
                f"{peer.worker_id} {format_incarnation(peer.incarnation)} was replaced by a newer start",
                worker_id=peer.worker_id,
            )
        return self.usable_to(peer)

    def usable_to(self, peer: PeerInfo) -> Link | None:
        """The usable link to exactly this incarnation. From any thread."""
        link = self._links.get(peer.worker_id)
        return link if link is not None and link.peer.incarnation == peer.incarnation and not link.is_dead else None

    def add(self, link: Link) -> Link | None:
        """Make ``link`` the usable one of its worker. Returns the link it replaces, now retired."""
        self.keep(link)
        old = self._links.get(link.peer.worker_id)
        if old is link:
            return None
        self._links[link.peer.worker_id] = link
        return self._retire(old)

    def keep(self, link: Link) -> None:
        """A link that was discarded is tried again: it is not disconnected meanwhile."""
        if link in self._retired:
            self._retired.remove(link)

    def drop_dead(self, peer: PeerInfo) -> Link | None:
        """Take out a dead link to this very incarnation, so that it can be connected anew. The caller disconnects
        it."""
        link = self._links.get(peer.worker_id)
        if link is None or link.peer.incarnation != peer.incarnation or not link.is_dead:
            return None
        return self._links.pop(peer.worker_id)

    def put_back(self, link: Link) -> None:
        """Undo ``drop_dead``."""
        self._links[link.peer.worker_id] = link

    def discard(self, link: Link) -> None:
        """The link is of no use, but its incarnation may be tried again: disconnect it once it is quiet."""
        if self._links.get(link.peer.worker_id) is link:
            del self._links[link.peer.worker_id]
        if link not in self._retired:
            self._retired.append(link)

    def current(self, worker_id: WorkerId) -> Incarnation | None:
        """The incarnation that we have a link to."""
        link = self._links.get(worker_id)
        return None if link is None else link.peer.incarnation

    def forget(self, worker_id: WorkerId, incarnation: Incarnation) -> Link | None:
        """That incarnation is gone for good. Returns its link, now retired; None when there was none."""
        link = self._links.get(worker_id)
        if link is None or link.peer.incarnation != incarnation:
            self._remember(worker_id, incarnation)
            return None
        del self._links[worker_id]
        return self._retire(link)

    def is_usable(self, link: Link) -> bool:
        return self._links.get(link.peer.worker_id) is link and not link.is_dead

    @property
    def usable(self) -> tuple[Link, ...]:
        return tuple(link for link in self._links.values() if not link.is_dead)

    @property
    def num_retired(self) -> int:
        """Links that wait for their operations to become terminal."""
        return len(self._retired)

    def sweep(self, disconnect: Callable[[Link], None]) -> None:
        """Disconnect retired links on which nothing is pending."""
        quiet = [link for link in self._retired if link.num_pending == 0]
        if quiet:
            self._retired = [link for link in self._retired if link.num_pending]
            for link in quiet:
                disconnect(link)

    def _retire(self, link: Link | None) -> Link | None:
        if link is not None:
            self._retired.append(link)
            self._remember(link.peer.worker_id, link.peer.incarnation)
        return link

    def _remember(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        replaced = self._replaced.setdefault(worker_id, deque(maxlen=_REMEMBERED))
        if incarnation not in replaced:
            replaced.append(incarnation)
