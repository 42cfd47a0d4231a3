"""Usage on its way into the database: summed in memory, written in batches, each counted once.

    pending --a flush takes it--> batch n --written--> gone
                                     '--no answer--> kept and repeated as batch n; the database knows if it has it

Memory is bounded by days, keys and models, however long the database is away. A gateway that is stopped writes what it
has; one that is killed loses what it had not written: at most ``usage_flush_s`` of ended requests, and those that ran.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gateway.access.errors import StoreAway
from gateway.access.keys import KeyRecord
from gateway.access.store import UsageRow
from gateway.access.tally import Period
from gateway.usage import Usage

log = logging.getLogger(__name__)

RowKey = tuple[str, str, str]


class UsageSink(Protocol):
    async def add_usage(self, rows: Sequence[UsageRow], *, writer: str, batch: int) -> None: ...


class Ledger:
    """`run` is its one task. `writer` names this process for ever: no other may use it."""

    def __init__(self, sink: UsageSink, *, writer: str, wall: Callable[[], float]) -> None:
        self._sink = sink
        self._writer = writer
        self._wall = wall
        self._pending: dict[RowKey, UsageRow] = {}
        self._batch: dict[RowKey, UsageRow] = {}
        """What may be in the database already; empty when the last flush was answered."""
        self._number = 0
        self._flushing = asyncio.Lock()

    def add(self, key: KeyRecord, model: str, usage: Usage) -> None:
        """One request that ended."""
        day = Period.DAY.label(self._wall())
        at = (day, key.key_id, model)
        row = self._pending.get(at) or UsageRow(
            day=day,
            tenant=key.terms.tenant,
            key_id=key.key_id,
            model=model,
            num_requests=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_completion_tokens=0,
        )
        self._pending[at] = replace(
            row,
            num_requests=row.num_requests + 1,
            num_prompt_tokens=row.num_prompt_tokens + usage.num_prompt_tokens,
            num_cached_tokens=row.num_cached_tokens + usage.num_cached_tokens,
            num_completion_tokens=row.num_completion_tokens + usage.num_completion_tokens,
        )

    async def run(self, interval_s: float) -> None:
        """Never ends by itself; a database that is away is told once, and again when it is back."""
        is_away = False
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.flush()
            except StoreAway as error:
                if not is_away:
                    log.warning("usage not written, kept in memory", extra={"reason": str(error)})
                is_away = True
            else:
                if is_away:
                    log.info("usage is written again")
                is_away = False

    async def flush(self) -> None:
        """Returns when all that was pending is in the database. Raises StoreAway."""
        async with self._flushing:
            await self._write()  # a batch whose answer was lost comes first, as it was
            if self._pending:
                self._batch, self._pending = self._pending, {}
                self._number += 1
                await self._write()

    async def _write(self) -> None:
        if self._batch:
            await self._sink.add_usage(tuple(self._batch.values()), writer=self._writer, batch=self._number)
            self._batch = {}

    async def close(self) -> None:
        """Writes the rest. What cannot be written is told: nobody else will."""
        try:
            await self.flush()
        except StoreAway as error:
            lost = [*self._batch.values(), *self._pending.values()]
            log.error(
                "usage lost",
                extra={
                    "reason": str(error),
                    "num_requests": sum(row.num_requests for row in lost),
                    "num_prompt_tokens": sum(row.num_prompt_tokens for row in lost),
                    "num_completion_tokens": sum(row.num_completion_tokens for row in lost),
                },
            )
