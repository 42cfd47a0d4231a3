"""Tokens a request may use, reserved before it runs, and the account when it has ended, however that was.

reserved --------> running --settled--> usage in the ledger; what was not used is given back
    '--refused: nothing is held
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from core.access_config import AccessConfig
from core.errors import QuotaExceeded, RateLimited, ServingError
from core.tasks import TaskScope
from gateway.access.counters import CounterChoice, Counters
from gateway.access.errors import AccessUnknown, StoreAway
from gateway.access.keys import KeyRecord, KeyTerms
from gateway.access.ledger import Ledger
from gateway.access.store import AccessStore, UsageFilter
from gateway.access.tally import Ask, Budget, Period, Verdict
from gateway.access.windows import Reading
from gateway.usage import Usage

log = logging.getLogger(__name__)

MAX_LOADS = 8
JOIN_S = 2.0
T = TypeVar("T")
Show = Callable[[Reading], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may use."""

    model: str
    num_prompt_tokens: int
    num_choices: int
    """Of all its prompts."""
    max_tokens: int
    """Of one choice."""
    is_open_ended: bool
    """The caller named no number of tokens; the context is the limit."""


class Ticket:
    """A request that was let in. `settle` it once, with what it used; that never waits and never fails."""

    def __init__(self, settle: Callable[[Usage], None]) -> None:
        self._settle: Callable[[Usage], None] | None = settle

    def settle(self, usage: Usage) -> None:
        settle, self._settle = self._settle, None
        assert settle is not None, "a ticket is settled once"
        settle(usage)


@dataclass(slots=True, kw_only=True)
class _Taken:
    """What a request holds, and where."""

    key: KeyRecord
    ask: Ask
    tally: Counters | None = None
    windows: Counters | None = None
    reading: Reading | None = None


class Reservations:
    """`refuse` is told why each refused request was."""

    def __init__(
        self,
        *,
        config: AccessConfig,
        store: AccessStore,
        counters: CounterChoice,
        ledger: Ledger,
        wall: Callable[[], float],
        on_refusal: Callable[[str], None],
    ) -> None:
        self._projected_tokens = config.projected_tokens
        self._is_open_on_loss = config.on_store_loss == "open"
        self._store = store
        self._counters = counters
        self._ledger = ledger
        self._wall = wall
        self._on_refusal = on_refusal
        self._readings: dict[tuple[str, str], asyncio.Task[int | None]] = {}
        self._scope = TaskScope("reservations")

    async def close(self) -> None:
        """Waits, for a moment, until what ended is given back."""
        await self._scope.join(JOIN_S)
        await self._scope.close()

    async def reserve(self, key: KeyRecord, request_id: str, demand: Demand, show: Show) -> Ticket:
        """`show` is told how the rate of tokens stands. Raises RateLimited, QuotaExceeded, AccessUnknown. A caller that
        is cancelled meanwhile leaves nothing behind."""
        answer = min(demand.max_tokens, self._projected_tokens) if demand.is_open_ended else demand.max_tokens
        ask = Ask(
            key_id=key.key_id,
            request_id=request_id,
            num_tokens=demand.num_prompt_tokens + demand.num_choices * answer,
            max_streams=key.terms.max_streams,
            budgets=_budgets(key.terms, self._wall()),
        )
        if ask.max_streams is None and not ask.budgets and key.terms.tokens_per_minute is None:
            return Ticket(lambda usage: self._ledger.add(key, demand.model, usage))
        taking = asyncio.get_running_loop().create_task(self._take_all(key, ask, show), name="reserve")
        try:
            taken = await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._scope.spawn(self._undo(taking), name="undo")
            raise
        return Ticket(lambda usage: self._settle(demand.model, taken, usage))

    async def _take_all(self, key: KeyRecord, ask: Ask, show: Show) -> _Taken:
        taken = _Taken(key=key, ask=ask)
        try:
            if ask.max_streams is not None or ask.budgets:
                await self._open(taken)
            if key.terms.tokens_per_minute is not None:
                await self._take_tokens(taken, key.terms.tokens_per_minute, show)
        except ServingError:
            await self._give_back(taken, 0)
            raise
        return taken

    async def _undo(self, taking: asyncio.Task[_Taken]) -> None:
        try:
            taken = await taking
        except ServingError:
            return
        await self._give_back(taken, 0)

    # -- what runs, and budgets ---------------------------------------------------------------------------------------

    async def _open(self, taken: _Taken) -> None:
        key_id = taken.key.key_id
        for _ in range(MAX_LOADS):
            ask = taken.ask
            counters, verdict = await self._counters.run(lambda chosen: _on(chosen, chosen.tally.open(ask)))  # noqa: B023
            budget = verdict.unknown
            if budget is None:
                self._raise_for(taken.key, verdict)
                taken.tally = counters
                return
            num_tokens = await self._spent(key_id, budget)
            is_counted = await self._counters.run(
                lambda chosen: chosen.tally.begin(key_id, budget, num_tokens)  # noqa: B023
            )
            if not is_counted:  # nobody knows, and the setting says to serve: without a budget for once
                taken.ask = replace(ask, budgets=tuple(one for one in ask.budgets if one is not budget))
        raise AccessUnknown("budgets cannot be checked at the moment; try again shortly", retry_after_s=1)

    async def _spent(self, key_id: str, budget: Budget) -> int | None:
        """Tokens of the period by the database, asked once for all who want to know. None: it is away, and that is no
        reason to refuse."""
        at = (key_id, budget.label)
        reading = self._readings.get(at)
        if reading is None:
            reading = self._readings[at] = self._scope.spawn(self._read_spent(key_id, budget), name="read-budget")
            reading.add_done_callback(lambda _: self._readings.pop(at))
        num_tokens = await asyncio.shield(reading)
        if num_tokens is None and not self._is_open_on_loss:
            raise AccessUnknown("budgets cannot be checked at the moment; try again shortly", retry_after_s=1)
        return num_tokens

    async def _read_spent(self, key_id: str, budget: Budget) -> int | None:
        try:
            await self._ledger.flush()  # what this gateway has not written yet counts too
            return await self._store.num_tokens(UsageFilter(key_id=key_id, since=budget.label, until=budget.last_day))
        except StoreAway as error:
            log.warning("budget not read", extra={"reason": str(error), "key_id": key_id})
            return None

    def _raise_for(self, key: KeyRecord, verdict: Verdict) -> None:
        if verdict.has_too_many_streams:
            self._on_refusal("max_streams")
            raise RateLimited(
                f"this key may run {key.terms.max_streams} requests at once; wait until one has ended", retry_after_s=1
            )
        budget = verdict.exceeded
        if budget is not None:
            self._on_refusal(f"tokens_per_{budget.period}")
            raise QuotaExceeded(
                f"this key may use {budget.limit} tokens a {budget.period}, and what is left for {budget.label} (UTC) "
                "is less than this request may use",
                retry_after_s=budget.period.ends_in_s(self._wall()),
            )

    # -- the rate of tokens -------------------------------------------------------------------------------------------

    async def _take_tokens(self, taken: _Taken, limit: int, show: Show) -> None:
        name, amount = rate_name(taken.key, "tokens"), taken.ask.num_tokens
        counters, reading = await self._counters.run(
            lambda chosen: _on(chosen, chosen.windows.take(name, amount, limit))
        )
        show(reading)
        if reading.wait_s is None:
            taken.windows, taken.reading = counters, reading
            return
        self._on_refusal("tokens_per_minute")
        if reading.wait_s == math.inf:
            raise RateLimited(
                f"this request may use {amount} tokens and this key allows {limit} a minute; lower 'max_tokens' or "
                "shorten the prompt",
                retry_after_s=math.inf,
            )
        raise rate_limited("tokens", reading)

    # -- the account --------------------------------------------------------------------------------------------------

    def _settle(self, model: str, taken: _Taken, usage: Usage) -> None:
        self._ledger.add(taken.key, model, usage)
        num_tokens = usage.num_prompt_tokens + usage.num_completion_tokens
        self._scope.spawn(self._give_back(taken, num_tokens), name="settle")

    async def _give_back(self, taken: _Taken, num_used: int) -> None:
        """Where it was taken. A store that is away forgets by itself: rates in two minutes, what runs in 15 s."""
        ask, reading, now = taken.ask, taken.reading, self._wall()
        labels = [(budget.period, budget.period.label(now)) for budget in ask.budgets]
        try:
            if taken.tally is not None:
                await taken.tally.run(lambda chosen: chosen.tally.close(ask, num_used, labels))
            if taken.windows is not None and reading is not None:
                name, difference = rate_name(taken.key, "tokens"), num_used - ask.num_tokens
                await taken.windows.run(lambda chosen: chosen.windows.correct(name, reading, difference))
        except StoreAway as error:
            log.debug("reservation not given back", extra={"reason": str(error), "key_id": ask.key_id})


def rate_name(key: KeyRecord, what: str) -> str:
    return f"{key.key_id}:{what}"


def rate_limited(what: str, reading: Reading) -> RateLimited:
    wait_s = math.ceil(reading.wait_s or 0)
    return RateLimited(
        f"this key allows {reading.limit} {what} a minute; try again in {wait_s} s", retry_after_s=reading.wait_s
    )


def _budgets(terms: KeyTerms, now: float) -> tuple[Budget, ...]:
    limits = ((Period.DAY, terms.tokens_per_day), (Period.MONTH, terms.tokens_per_month))
    return tuple(Budget(period=one, label=one.label(now), limit=limit) for one, limit in limits if limit is not None)


async def _on(counters: Counters, work: Awaitable[T]) -> tuple[Counters, T]:
    return counters, await work
