"""What happened to the cluster, for people: a bounded list of events that who watches reads on from where it was."""

from collections import OrderedDict
from dataclasses import dataclass, replace

from core.clock import Clock
from core.ids import format_incarnation
from core.types import ClusterEvent, EventKind, WorkerState
from router.registry import StateChange

MAX_EVENTS = 500
GOES_ON_S = 10.0
"""The same again within this time is the same event: refusals come by the hundred."""


@dataclass(slots=True)
class _Entry:
    event: ClusterEvent
    at: float
    version: int


class Chronicle:
    """The latest events. A version is a place in it: what was told or told again behind it is what is new."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """By number, in the order of their last time."""
        self._num_events = 0
        self.version = 0

    def note(self, kind: EventKind, subject: str, text: str) -> None:
        """Something happened. What is like the last events and not long ago is counted in with them."""
        now = self._clock.now()
        self.version += 1
        for number, entry in reversed(self._entries.items()):
            if now - entry.at > GOES_ON_S:
                break
            event = entry.event
            if (event.kind, event.subject, event.text) == (kind, subject, text):
                self._entries[number] = _Entry(replace(event, count=event.count + 1), now, self.version)
                self._entries.move_to_end(number)
                return
        self._num_events += 1
        event = ClusterEvent(number=self._num_events, kind=kind, subject=subject, text=text, age_s=0.0)
        self._entries[self._num_events] = _Entry(event, now, self.version)
        if len(self._entries) > MAX_EVENTS:
            self._entries.popitem(last=False)

    def note_change(self, change: StateChange) -> None:
        """A worker's state as judged. Drains that somebody asked for were noted when they were."""
        told = _told(change)
        if told is None or (told[0] is EventKind.DRAIN and self._was_sent_away(change.worker_id)):
            return
        self.note(told[0], change.worker_id, told[1])

    def since(self, version: int) -> tuple[ClusterEvent, ...]:
        """What is new behind ``version``, oldest first."""
        now = self._clock.now()
        new: list[ClusterEvent] = []
        for entry in reversed(self._entries.values()):
            if entry.version <= version:
                break
            new.append(replace(entry.event, age_s=now - entry.at))
        return tuple(reversed(new))

    def _was_sent_away(self, worker_id: str) -> bool:
        last = next((e.event for e in reversed(self._entries.values()) if e.event.subject == worker_id), None)
        return last is not None and last.kind in (EventKind.DRAIN, EventKind.FLIP)


def _told(change: StateChange) -> tuple[EventKind, str] | None:
    before, after = change.before, change.after
    name = f"incarnation {format_incarnation(change.incarnation)}"
    if before is None and after is not None and after is not WorkerState.LOST:
        return EventKind.JOINED, f"joined, {name}"
    match after:
        case WorkerState.SUSPECT:
            return EventKind.SUSPECT, f"its stream broke or it is silent, {name}"
        case WorkerState.DRAINING:
            return EventKind.DRAIN, "drains: its process was told to stop"
        case WorkerState.LOST:
            return (
                (EventKind.LEFT, f"has left, {name}")
                if before is WorkerState.DRAINING
                else (EventKind.DEATH, f"is lost: silent for too long, {name}")
            )
        case WorkerState.READY:
            is_back = before is WorkerState.SUSPECT
            return EventKind.RECOVERED if is_back else EventKind.JOINED, "is heard again" if is_back else "is ready"
        case None:
            if before is WorkerState.DRAINING:
                return EventKind.LEFT, f"has left, {name}"
            return None if before is WorkerState.LOST else (EventKind.DEATH, f"is gone: another took its place, {name}")
    return None
