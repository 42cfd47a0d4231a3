"""What every place to count in must do: this process's memory, and a real Valkey server shared by two gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis

from core.access_config import AccessConfig
from core.clock import ManualClock
from gateway.access import shared_tally
from gateway.access.counters import CounterChoice, Counters, SharedCounters, local_counters
from gateway.access.errors import AccessUnknown, StoreAway
from gateway.access.tally import REFRESH_S, Ask, Budget, LocalTally, Period, Verdict
from gateway.access.windows import Memory, Windows
from tests.support.valkey import ValkeyServer

NOON = 1_796_040_000.0
LABELS = ((Period.DAY, "2026-11-30"), (Period.MONTH, "2026-11"))


def wall() -> float:
    return NOON + 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    started = ValkeyServer(tmp_path_factory.mktemp("valkey")).start()
    yield started
    started.kill()


@pytest.fixture
def key_id(request: pytest.FixtureRequest) -> str:
    """A key of the test's own: the server is shared."""
    return str(abs(hash(request.node.name)))


Pair = tuple[Counters, Counters]
places = pytest.mark.parametrize("pair", ["memory", pytest.param("shared", marks=pytest.mark.processes)], indirect=True)


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """What two users of one place have: the same counters in memory, two clients of one server."""
    if request.param == "memory":
        counters = local_counters(wall)
        yield counters, counters
        return
    config = AccessConfig(limits_store=request.getfixturevalue("server").url, store_timeout_s=20)
    both = SharedCounters(config, wall), SharedCounters(config, wall)
    yield both
    for one in both:
        await one.close()


def ask(key_id: str, request_id: str, *, tokens: int = 0, streams: int | None = None, **limits: int) -> Ask:
    labels = {"day": LABELS[0], "month": LABELS[1]}
    budgets = tuple(
        Budget(period=labels[name][0], label=labels[name][1], limit=limit) for name, limit in limits.items()
    )
    return Ask(key_id=key_id, request_id=request_id, num_tokens=tokens, max_streams=streams, budgets=budgets)


async def opened(counters: Counters, asked: Ask, *, spent: int = 0) -> Verdict:
    """As the gate does it: counters that are not there begin with what the database has."""
    while True:
        verdict = await counters.run(lambda one: one.tally.open(asked))
        if verdict.unknown is None:
            return verdict
        await counters.tally.begin(asked.key_id, verdict.unknown, spent)


async def closed(counters: Counters, asked: Ask, used: int = 0) -> None:
    await counters.tally.close(asked, used, LABELS)


@places
async def test_requests_at_once_are_counted_together(pair: Pair, key_id: str) -> None:
    first, second = pair
    asks = [ask(key_id, f"r{number}", streams=3) for number in range(8)]
    verdicts = await asyncio.gather(*(opened(pair[at % 2], one) for at, one in enumerate(asks)))
    assert sum(not verdict.has_too_many_streams for verdict in verdicts) == 3
    running = [one for one, verdict in zip(asks, verdicts, strict=True) if verdict == Verdict()]
    await closed(pair[int(running[0].request_id[1:]) % 2], running[0])
    assert await opened(second, ask(key_id, "another", streams=3)) == Verdict()
    assert (await opened(first, ask(key_id, "more", streams=3))).has_too_many_streams
    assert await opened(first, ask(f"{key_id}x", "other", streams=1)) == Verdict(), "keys are apart"


@places
async def test_reservations_and_use_share_one_budget(pair: Pair, key_id: str) -> None:
    first, second = pair
    one, two = ask(key_id, "1", tokens=60, day=100), ask(key_id, "2", tokens=41, day=100)
    assert await opened(first, one) == Verdict()
    assert (await opened(second, two)).exceeded == two.budgets[0]
    await closed(first, one, 59)
    assert await opened(second, two) == Verdict()
    await closed(second, two, 41)
    assert (await opened(first, ask(key_id, "3", tokens=1, day=100))).exceeded is not None
    assert await opened(first, ask(key_id, "4", tokens=0, day=100)) == Verdict()


@places
async def test_a_budget_begins_with_what_the_database_has(pair: Pair, key_id: str) -> None:
    first, second = pair
    assert (await opened(first, ask(key_id, "1", tokens=11, month=100), spent=90)).exceeded is not None
    assert await opened(second, ask(key_id, "2", tokens=10, month=100), spent=0) == Verdict(), "it begins once"
    assert (await opened(first, ask(key_id, "3", tokens=1, month=100, day=5))).exceeded is not None


@places
async def test_the_stricter_of_two_budgets_decides(pair: Pair, key_id: str) -> None:
    asked = ask(key_id, "1", tokens=10, day=10, month=9)
    verdict = await opened(pair[0], asked)
    assert verdict.exceeded is not None
    assert verdict.exceeded.period is Period.MONTH
    assert await opened(pair[1], ask(key_id, "2", tokens=9, day=10, month=9)) == Verdict(), "a refusal held nothing"


async def test_in_memory_a_budget_is_read_anew_for_what_others_use() -> None:
    now = NOON
    tally = LocalTally(lambda: now)
    counters = Counters(Windows(Memory(), wall), tally)
    assert await opened(counters, ask("k", "1", tokens=10, day=100), spent=50) == Verdict()
    assert await opened(counters, ask("k", "2", tokens=10, day=100), spent=80) == Verdict(), "not asked yet"
    now += REFRESH_S + 1
    assert (await opened(counters, ask("k", "3", tokens=10, day=100), spent=80)).exceeded is not None


@places
async def test_a_database_that_is_away_begins_no_shared_budget_with_a_guess(pair: Pair, key_id: str) -> None:
    (budget,) = ask(key_id, "1", day=5).budgets
    is_local = isinstance(pair[0].tally, LocalTally)
    assert await pair[0].tally.begin(key_id, budget, None) is is_local
    assert ((await pair[0].tally.open(ask(key_id, "1", day=5))).unknown is None) is is_local


@places
async def test_rates_are_counted_together_and_given_back(pair: Pair, key_id: str) -> None:
    readings = await asyncio.gather(*(pair[at % 2].windows.take(key_id, 3, 100) for at in range(60)))
    taken = [reading for reading in readings if reading.wait_s is None]
    assert len(taken) == 33
    await pair[1].windows.correct(key_id, taken[0], -3)
    assert (await pair[0].windows.take(key_id, 0, 100)).remaining == 4


@pytest.mark.processes
async def test_a_crowd_waits_for_connections_and_is_counted(server: ValkeyServer, key_id: str) -> None:
    shared = SharedCounters(AccessConfig(limits_store=server.url, store_timeout_s=30), wall)
    choice = CounterChoice(local=local_counters(wall), shared=shared, is_open_on_loss=False, clock=ManualClock())
    work = [choice.run(lambda counters: counters.windows.take(key_id, 1, 400)) for _ in range(600)]
    assert sum(reading.wait_s is None for reading in await asyncio.gather(*work)) == 400
    await shared.close()


@pytest.mark.processes
async def test_a_password_is_read_from_its_file(tmp_path: Path, key_id: str) -> None:
    server = ValkeyServer(tmp_path, password="a password").start()
    (tmp_path / "password").write_text("a password\n")
    settings = {"limits_store": server.url, "store_timeout_s": 20.0}
    right = SharedCounters(AccessConfig(**settings, limits_password_file=str(tmp_path / "password")), wall)
    without = SharedCounters(AccessConfig(**settings), wall)
    try:
        assert await opened(right, ask(key_id, "1", streams=1)) == Verdict()
        assert (await right.windows.take(key_id, 1, 5)).remaining == 4
        with pytest.raises(StoreAway, match="Authentication"):
            await without.run(lambda counters: counters.windows.take(key_id, 1, 5))
    finally:
        await right.close()
        await without.close()
        server.kill()


@pytest.mark.processes
async def test_the_running_requests_of_a_gateway_that_died_end_by_themselves(
    server: ValkeyServer, key_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AccessConfig(limits_store=server.url, store_timeout_s=20)
    dead, alive = SharedCounters(config, wall), SharedCounters(config, wall)
    monkeypatch.setattr(shared_tally, "LEASE_S", 1)
    assert await opened(dead, ask(key_id, "lost", streams=1)) == Verdict()
    monkeypatch.setattr(shared_tally, "LEASE_S", 1000)
    async with asyncio.timeout(60):
        while (await opened(alive, ask(key_id, "next", streams=1))).has_too_many_streams:
            await asyncio.sleep(0.05)
    monkeypatch.setattr(shared_tally, "LEASE_S", 9000)
    await alive.tally.renew()
    redis = Redis.from_url(server.url)
    [(_, ends_ms)] = await redis.zrange(f"baton:{{{key_id}}}:running", 0, -1, withscores=True)
    now_s, _ = await redis.time()
    assert ends_ms / 1000 > now_s + 2000, "a renewed one goes on"
    await redis.aclose()
    await dead.close()
    await alive.close()


@pytest.mark.processes
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("loss", ["killed", "hangs", "never there"])
async def test_a_store_that_is_away_follows_the_setting_in_bounded_time(
    tmp_path: Path, is_open: bool, loss: str, key_id: str
) -> None:
    server = ValkeyServer(tmp_path)
    if loss != "never there":
        server.start()
    config = AccessConfig(limits_store=server.url, store_timeout_s=0.3)
    clock, shared = ManualClock(), SharedCounters(config, wall)
    choice = CounterChoice(local=local_counters(wall), shared=shared, is_open_on_loss=is_open, clock=clock)
    num_calls = 0

    async def take(counters: Counters) -> bool:
        nonlocal num_calls
        num_calls += counters is shared
        return (await counters.windows.take(key_id, 1, 2)).wait_s is None

    if loss != "never there":
        await until_shared(choice, clock)
    if loss == "killed":
        server.kill()
    if loss == "hangs":
        server.stop()
    num_calls = 0
    try:
        async with asyncio.timeout(20):
            if is_open:
                assert [await choice.run(take) for _ in range(20)] == [True, True] + 18 * [False], "it counts alone"
            else:
                for _ in range(20):
                    with pytest.raises(AccessUnknown) as refused:
                        await choice.run(take)
                    assert refused.value.retry_after_s
        assert num_calls <= 2, "a store that is away is left alone for a moment"
        if loss == "hangs":
            server.go_on()
        else:
            server.start()
        await until_shared(choice, clock)
    finally:
        server.kill()
        await shared.close()


async def until_shared(choice: CounterChoice, clock: ManualClock) -> None:
    """On a busy machine a healthy store may miss its time: until the shared counters are asked, and answer."""
    async with asyncio.timeout(60):
        while True:
            clock.advance(2)
            with suppress(AccessUnknown):
                await choice.run(lambda counters: counters.windows.take("warm", 1, 1_000_000))
                if choice.is_shared:
                    return
