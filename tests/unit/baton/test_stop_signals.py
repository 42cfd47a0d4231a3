"""When a signal may come, and what it does then."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from baton.stop_signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_there_is_a_task_stops_it_as_soon_as_there_is_one(number: signal.Signals) -> None:
    reached: list[str] = []

    async def run(signals: StopSignals) -> None:
        signal.raise_signal(number)
        with pytest.raises(asyncio.CancelledError):
            await signals.attach(hurry=lambda: reached.append("hurry"))
        assert signals.was_told_to_stop

    with StopSignals() as signals:
        asyncio.run(run(signals))
    assert reached == []


def test_the_first_signal_cancels_and_the_next_ones_hurry() -> None:
    reached: list[str] = []

    async def run(signals: StopSignals) -> None:
        await signals.attach(hurry=lambda: reached.append("hurry"))
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            reached.append("cancelled")
        signals.begin_stop()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with StopSignals() as signals:
        asyncio.run(run(signals))
    assert reached == ["cancelled", "hurry"]


def test_signals_after_the_end_change_nothing() -> None:
    async def run(signals: StopSignals) -> None:
        await signals.attach(hurry=lambda: pytest.fail("nothing is left to hurry"))
        signals.detach()
        signal.raise_signal(signal.SIGTERM)

    with StopSignals() as signals:
        asyncio.run(run(signals))
        signal.raise_signal(signal.SIGINT)
    for number in STOP_SIGNALS:
        signal.raise_signal(number)


def test_a_sighup_that_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert not signals.was_told_to_stop
