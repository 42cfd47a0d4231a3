"""Requests of a key that run at once, and budgets of tokens for a day and a month: counted together, in one step.

What a running request may use is reserved with it and ends with it; what it did use is added to the budgets' counters
when it ends. So a counter holds true usage only, and a gateway that dies takes its reservations with it. A counter that
is not there yet begins with what the database says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

REFRESH_S = 10.0


class Period(StrEnum):
    """Of a budget, in UTC."""

    DAY = "day"
    MONTH = "month"

    def label(self, now: float) -> str:
        """``2026-11-30`` or ``2026-11``: what days of usage begin with."""
        return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d" if self is Period.DAY else "%Y-%m")

    def ends_in_s(self, now: float) -> float:
        at = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self is Period.DAY:
            return at.timestamp() + 86_400 - now
        return at.replace(year=at.year + at.month // 12, month=at.month % 12 + 1, day=1).timestamp() - now


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Tokens that a key may use in a period."""

    period: Period
    label: str
    limit: int

    @property
    def last_day(self) -> str:
        """A text that no day of the period is behind (days have two digits)."""
        return self.label if self.period is Period.DAY else f"{self.label}-31"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that wants in."""

    key_id: str
    request_id: str
    num_tokens: int
    """What it may use at most."""
    max_streams: int | None
    budgets: tuple[Budget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Let in, unless one of these says why not."""

    has_too_many_streams: bool = False
    exceeded: Budget | None = None
    unknown: Budget | None = None
    """Its counter is not there: call `begin`, then ask again."""


class Tally(Protocol):
    async def open(self, ask: Ask) -> Verdict:
        """Counts a request in, or nothing."""

    async def begin(self, key_id: str, budget: Budget, num_tokens: int | None) -> bool:
        """The counter of a budget begins with what the database has, unless it is there by now. None: the database does
        not say. Whether the budget is counted now."""

    async def close(self, ask: Ask, num_tokens: int, labels: Sequence[tuple[Period, str]]) -> None:
        """Ends what `open` let in. `num_tokens` were used, in the periods of `labels`."""

    async def renew(self) -> None:
        """Keeps what runs here, where it would be forgotten otherwise."""


@dataclass(slots=True)
class _Spent:
    """A budget's counter."""

    label: str
    num_tokens: int
    read_at: float
    """When the database was asked."""


class LocalTally:
    """Of this process alone. Nothing is awaited, so a look and a step are one.

    Counters begin anew with the database's sums every `REFRESH_S`, for other gateways may write there too.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._open: dict[str, dict[str, int]] = {}
        """By key and request: the reserved tokens."""
        self._spent: dict[tuple[str, Period], _Spent] = {}

    async def open(self, ask: Ask) -> Verdict:
        running = self._open.get(ask.key_id, {})
        if ask.max_streams is not None and len(running) >= ask.max_streams:
            return Verdict(has_too_many_streams=True)
        reserved = sum(running.values()) + ask.num_tokens if ask.budgets else 0
        for budget in ask.budgets:
            spent = self._find(ask.key_id, budget)
            if spent is None or self._wall() - spent.read_at > REFRESH_S:
                return Verdict(unknown=budget)
            if spent.num_tokens + reserved > budget.limit:
                return Verdict(exceeded=budget)
        self._open.setdefault(ask.key_id, {})[ask.request_id] = ask.num_tokens
        return Verdict()

    async def begin(self, key_id: str, budget: Budget, num_tokens: int | None) -> bool:
        known = self._find(key_id, budget)
        if num_tokens is None:
            num_tokens = 0 if known is None else known.num_tokens
        self._spent[key_id, budget.period] = _Spent(budget.label, num_tokens, self._wall())
        return True

    async def close(self, ask: Ask, num_tokens: int, labels: Sequence[tuple[Period, str]]) -> None:
        running = self._open.get(ask.key_id, {})
        running.pop(ask.request_id, None)
        if not running:
            self._open.pop(ask.key_id, None)
        for period, label in labels:
            spent = self._spent.get((ask.key_id, period))
            if spent is not None and spent.label == label:
                spent.num_tokens += num_tokens

    async def renew(self) -> None:
        """Nothing is forgotten here."""

    def _find(self, key_id: str, budget: Budget) -> _Spent | None:
        spent = self._spent.get((key_id, budget.period))
        return spent if spent is not None and spent.label == budget.label else None
