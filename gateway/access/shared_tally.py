"""The tally that many gateways share, in Redis or Valkey: each step is one script there, so none comes between.

Running requests of a key are members of a sorted set, scored by when they are forgotten: their gateway renews them, and
those of a gateway that died end by themselves after `LEASE_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.access.tally import Ask, Budget, Period, Verdict

if TYPE_CHECKING:
    from redis.asyncio import Redis  # installed only where a store is used

LEASE_S = 15
RENEW_S = 4
KEPT_S = {Period.DAY: 2 * 86_400, Period.MONTH: 33 * 86_400}

_OPEN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local max_streams = tonumber(ARGV[4])
if max_streams > 0 and redis.call('ZCARD', KEYS[1]) >= max_streams then
  return {'streams', 0}
end
if #KEYS > 1 then
  local reserved = tonumber(ARGV[3])
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    reserved = reserved + tonumber(string.match(member, '%d+$'))
  end
  for index = 2, #KEYS do
    local spent = redis.call('GET', KEYS[index])
    if not spent then
      return {'unknown', index - 2}
    end
    if spent + reserved > tonumber(ARGV[3 + index]) then
      return {'exceeded', index - 2}
    end
  end
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
return {'in', 0}
"""
"""KEYS: running requests, counters. ARGV: member, lease in ms, tokens, most streams (0: any number), limits."""

_CLOSE = """
redis.call('ZREM', KEYS[1], ARGV[1])
for index = 2, #KEYS do
  if redis.call('EXISTS', KEYS[index]) == 1 then
    redis.call('INCRBY', KEYS[index], ARGV[2])
  end
end
"""
"""A counter that is not there is not made: it will begin with what the database has then."""

_RENEW = """
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for index = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[index])
end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
"""


class SharedTally:
    """Raises what the client raises. `renew` must be called every `RENEW_S`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._scripts = {text: redis.register_script(text) for text in (_OPEN, _CLOSE, _RENEW)}
        self._mine: dict[str, set[str]] = {}

    async def open(self, ask: Ask) -> Verdict:
        keys = [_running(ask.key_id), *(_counter(ask.key_id, one.period, one.label) for one in ask.budgets)]
        limits = (one.limit for one in ask.budgets)
        arguments: list[str | int] = [_member(ask), 1000 * LEASE_S, ask.num_tokens, ask.max_streams or 0, *limits]
        answer, index = await self._scripts[_OPEN](keys=keys, args=arguments)
        match answer:
            case b"streams":
                return Verdict(has_too_many_streams=True)
            case b"exceeded":
                return Verdict(exceeded=ask.budgets[index])
            case b"unknown":
                return Verdict(unknown=ask.budgets[index])
        self._mine.setdefault(ask.key_id, set()).add(_member(ask))
        return Verdict()

    async def begin(self, key_id: str, budget: Budget, num_tokens: int | None) -> bool:
        """A counter that all gateways share never begins with a guess."""
        if num_tokens is None:
            return False
        counter = _counter(key_id, budget.period, budget.label)
        await self._redis.set(counter, num_tokens, nx=True, ex=KEPT_S[budget.period])
        return True

    async def close(self, ask: Ask, num_tokens: int, labels: Sequence[tuple[Period, str]]) -> None:
        members = self._mine.get(ask.key_id, set())
        members.discard(_member(ask))
        if not members:
            self._mine.pop(ask.key_id, None)
        keys = [_running(ask.key_id), *(_counter(ask.key_id, period, label) for period, label in labels)]
        await self._scripts[_CLOSE](keys=keys, args=[_member(ask), num_tokens])

    async def renew(self) -> None:
        """Keeps this gateway's running requests. One that just ended is not brought back."""
        for key_id, members in tuple(self._mine.items()):
            await self._scripts[_RENEW](keys=[_running(key_id)], args=[1000 * LEASE_S, *members])


def _running(key_id: str) -> str:
    return f"baton:{{{key_id}}}:running"


def _counter(key_id: str, period: Period, label: str) -> str:
    return f"baton:{{{key_id}}}:{period}:{label}"


def _member(ask: Ask) -> str:
    return f"{ask.request_id}:{ask.num_tokens}"
