"""Who is next: the waiting requests of one model, bounded, by class, between tenants, and by age. Pure bookkeeping: no
clock, no I/O; what it holds are tickets.

- **Classes**: the highest with a waiter is served, but every ``STEP`` tickets of others one of a class that was passed
  over: a class may be slow, it never stands still.
- **Tenants** of a class share it by the tokens they have had, as virtual token counters do (Sheng et al., "Fairness in
  Serving Large Language Models", OSDI 2024): the tenant with the smallest counter is next, and what it is given is
  added to it. A tenant that comes (again) starts at the smallest counter of those who wait, so nobody saves up a right
  by staying away, and nobody's past use is held against them for longer than the others need to catch up.
- **Within a tenant**: lower priority number, then age.

The fairness bound: while two tenants of a class both wait, what they have been given differs by no more than twice the
dearest ticket. The bound of the length: ``max_waiting`` tickets that were never served, and one for each class that
would have none.

When it is full, an arrival takes the place of the youngest ticket of a lower class (never of the oldest one of its
class), or, within its class, of the youngest of the tenant with most tickets if the arrival's has at least two less; or
it is refused. Tickets that were served before (their worker failed, or had no room) are neither refused nor
displaced, and go before all others: their answers may have begun.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from core.priority import PriorityClass

STEP = 16
"""Of so many tickets in a row one goes to a class that has waited all the time."""
CLASSES = tuple(PriorityClass)


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A place in the queue."""

    tenant: str
    priority: int
    since: float
    """When the request was first asked for: the oldest goes first."""
    cost: float
    """Weighted tokens, as far as they are known beforehand."""
    was_served: bool = False
    """It had a place at workers before: the queue takes it back whatever its length."""
    number: int = 0
    """Of arrival; set by the queue."""

    @property
    def priority_class(self) -> PriorityClass:
        return PriorityClass.of(self.priority)

    @property
    def order(self) -> tuple[int, float, int]:
        return self.priority, self.since, self.number


class Full(Exception):
    """No place. ``is_tenants_doing``: nobody has more waiting than the tenant that was refused."""

    def __init__(self, *, is_tenants_doing: bool) -> None:
        super().__init__("full")
        self.is_tenants_doing = is_tenants_doing


@dataclass(slots=True)
class _Lane:
    """One class: its tickets by tenant, and the counters."""

    tickets: dict[str, list[Ticket]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    """Of tenants that wait, and of others whose counter is above the floor."""
    floor: float = 0.0
    """Where a tenant starts that comes now."""
    num_passed: int = 0
    """Tickets of other classes that were served since this one waits."""

    def __len__(self) -> int:
        return sum(map(len, self.tickets.values()))

    def counter(self, tenant: str) -> float:
        """Of a tenant that waits, or comes now."""
        return max(self.counters.get(tenant, 0.0), 0.0 if tenant in self.tickets else self.floor)

    def by_turn(self) -> list[str]:
        return sorted(self.tickets, key=lambda tenant: (self.counters[tenant], self.tickets[tenant][0].order))

    def add(self, ticket: Ticket) -> None:
        self.counters[ticket.tenant] = self.counter(ticket.tenant)
        insort(self.tickets.setdefault(ticket.tenant, []), ticket, key=lambda each: each.order)

    def remove(self, ticket: Ticket) -> None:
        mine = self.tickets[ticket.tenant]
        mine.remove(ticket)
        if not mine:
            del self.tickets[ticket.tenant]
            self._settle(last=ticket.tenant)
        if not self.tickets:
            self.num_passed = 0

    def charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] = max(0.0, self.counter(tenant) + cost)
        self._settle(last=tenant)

    def _settle(self, *, last: str) -> None:
        """Raise the floor, and forget the counters of absent tenants that it has reached."""
        present = [self.counters[tenant] for tenant in self.tickets]
        self.floor = max(self.floor, min(present) if present else self.counters.get(last, 0.0))
        for tenant in [t for t, c in self.counters.items() if t not in self.tickets and c <= self.floor]:
            del self.counters[tenant]


class FairQueue:
    """The tickets of one model."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._lanes = {each: _Lane() for each in CLASSES}
        self._numbers = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._lanes[ticket.priority_class].tickets.get(ticket.tenant, ())

    def num_waiting(self, priority_class: PriorityClass) -> int:
        return len(self._lanes[priority_class])

    # -- coming and going ---------------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket) -> Ticket | None:
        """Take a place; returns the ticket that lost its own to this one, if any. Raises Full."""
        displaced = None
        if not ticket.was_served and self._num_new() >= self.max_waiting:
            displaced = self._make_place(ticket)
        if displaced is not None:
            self.leave(displaced)
        ticket.number = next(self._numbers)
        self._lanes[ticket.priority_class].add(ticket)
        return displaced

    def leave(self, ticket: Ticket) -> None:
        """Without having been served."""
        self._lanes[ticket.priority_class].remove(ticket)

    def serve(self, ticket: Ticket) -> None:
        """The ticket leaves because its request is placed; its tenant is charged for it."""
        lane = self._lanes[ticket.priority_class]
        lane.charge(ticket.tenant, ticket.cost)
        lane.remove(ticket)
        lane.num_passed = 0
        for other in self._lanes.values():
            if other is not lane and other.tickets:
                other.num_passed += 1

    def charge(self, tenant: str, priority: int, cost: float) -> None:
        """For what did not wait; or a correction of what was charged, up or down."""
        self._lanes[PriorityClass.of(priority)].charge(tenant, cost)

    def _num_new(self) -> int:
        return sum(
            not each.was_served for lane in self._lanes.values() for mine in lane.tickets.values() for each in mine
        )

    def _make_place(self, arrival: Ticket) -> Ticket | None:
        """Whose place the arrival takes; None: it has one of its own, as the first of its class."""
        own = self._lanes[arrival.priority_class]
        for lower in reversed(CLASSES):
            if lower is arrival.priority_class:
                break
            waiting = sorted(
                (each for mine in self._lanes[lower].tickets.values() for each in mine), key=lambda each: each.order
            )
            youngest = next((each for each in reversed(waiting[1:]) if not each.was_served), None)
            if youngest is not None:
                return youngest
        if not own.tickets and self.max_waiting:
            return None
        num_mine = len(own.tickets.get(arrival.tenant, ()))
        longest = max(own.tickets, key=lambda tenant: len(own.tickets[tenant]), default=arrival.tenant)
        theirs = own.tickets.get(longest, [])
        youngest = next((each for each in reversed(theirs) if not each.was_served), None)
        if youngest is not None and len(theirs) >= num_mine + 2:
            return youngest
        raise Full(is_tenants_doing=num_mine > 0 and num_mine >= len(theirs) and len(own.tickets) > 1)

    # -- order --------------------------------------------------------------------------------------------------------

    def in_turn(self) -> Iterator[Ticket]:
        """All tickets as they stand now, the next one first. Not to be changed while it is read."""
        lanes = self._lanes_by_turn()
        begun = [each for lane in lanes for mine in lane.tickets.values() for each in mine if each.was_served]
        yield from sorted(begun, key=lambda each: each.order)
        for lane in lanes:
            for tenant in lane.by_turn():
                yield from (each for each in lane.tickets[tenant] if not each.was_served)

    def _lanes_by_turn(self) -> list[_Lane]:
        lanes = [lane for lane in self._lanes.values() if lane.tickets]
        passed_over = [lane for lane in lanes if lane.num_passed >= STEP - 1]
        first = max(passed_over, key=lambda lane: lane.num_passed, default=None)
        return lanes if first is None else [first, *(lane for lane in lanes if lane is not first)]

    def work_ahead(self, tenant: str, priority: int) -> float:
        """What will be served before a ticket of this tenant that comes now, if nobody else comes."""
        own_class = PriorityClass.of(priority)
        work = 0.0
        for each in CLASSES[: CLASSES.index(own_class)]:
            work += sum(ticket.cost for mine in self._lanes[each].tickets.values() for ticket in mine)
        lane = self._lanes[own_class]
        own = sum(ticket.cost for ticket in lane.tickets.get(tenant, ()) if ticket.priority <= priority)
        level = lane.counter(tenant) + own
        for other, tickets in lane.tickets.items():
            if other != tenant:
                theirs = sum(ticket.cost for ticket in tickets)
                work += min(theirs, max(0.0, level - lane.counters[other]))
        return work + own

    def own_work_ahead(self, tenant: str, priority: int) -> float:
        """Of that, what is the tenant's own, in the class of the priority."""
        mine = self._lanes[PriorityClass.of(priority)].tickets.get(tenant, ())
        return sum(ticket.cost for ticket in mine if ticket.priority <= priority)

    def has_waiting(self, tenant: str, priority_class: PriorityClass) -> bool:
        return tenant in self._lanes[priority_class].tickets
