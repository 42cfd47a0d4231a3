"""Traffic: conversations are played open-loop, and what their callers saw is counted."""

from __future__ import annotations

import asyncio

import pytest

from bench.traffic import Conversation, Request, Sample, Slo, Stopwatch, Turn, goodput, hit_ratio, play, report


class Echo:
    """Answers with the number of its turn; the first request waits until the second was asked."""

    def __init__(self, *, outcome: str = "ok") -> None:
        self.asked: list[Request] = []
        self.outcome = outcome
        self.second = asyncio.Event()

    async def ask(self, request: Request) -> Sample:
        self.asked.append(request)
        watch = Stopwatch(request)
        if len(self.asked) == 2:
            self.second.set()
        await self.second.wait()
        watch.tokens([len(self.asked)] * request.max_tokens)
        return watch.sample(self.outcome)


def conversation(*turns: int, at_s: float = 0.0) -> Conversation:
    return Conversation(at_s=at_s, prefix=(9,), turns=tuple(Turn(tokens=(one,), max_tokens=1) for one in turns))


async def test_nobody_waits_for_the_answers_of_others() -> None:
    echo = Echo()
    samples = await play(echo.ask, [conversation(1), conversation(2, at_s=0.01)])
    assert len(samples) == 2 and all(sample.is_ok for sample in samples)
    assert samples[0].sent_s <= samples[1].sent_s


async def test_a_turn_says_all_that_was_said_before() -> None:
    echo = Echo()
    echo.second.set()
    await play(echo.ask, [conversation(5, 6, 7)])
    assert [request.prompt for request in echo.asked] == [(9, 5), (9, 5, 1, 6), (9, 5, 1, 6, 2, 7)]


async def test_an_error_ends_a_conversation() -> None:
    echo = Echo(outcome="queue_full")
    echo.second.set()
    samples = await play(echo.ask, [conversation(5, 6, 7)])
    assert [sample.outcome for sample in samples] == ["queue_full"]


def sample(*, ttft_s: float, tpot_s: float = 0.01, sent_s: float = 0.0, outcome: str = "ok", cached: int = 0) -> Sample:
    return Sample(
        label="",
        tenant="",
        priority=0,
        num_prompt_tokens=100,
        num_cached_tokens=cached,
        outcome=outcome,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 10 * tpot_s,
        itl_s=(tpot_s,) * 10,
        answer=tuple(range(11)),
        sent_s=sent_s,
    )


def test_good_is_what_was_answered_and_met_every_objective() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.02)
    samples = [
        sample(ttft_s=0.4),
        sample(ttft_s=0.6),
        sample(ttft_s=0.4, tpot_s=0.03),
        sample(ttft_s=0.1, outcome="worker_lost"),
    ]
    assert [slo.is_met(each) for each in samples] == [True, False, False, False]
    assert goodput(samples, slo, duration_s=2.0) == 0.5
    assert goodput(samples, slo) == pytest.approx(1 / 0.7)


def test_a_report_has_what_was_cached_and_what_failed() -> None:
    samples = [sample(ttft_s=0.1, cached=50), sample(ttft_s=0.1), sample(ttft_s=float("inf"), outcome="no_worker")]
    assert hit_ratio(samples[:2]) == 0.25
    assert report(samples).startswith("3 requests (1 failed), 25% of prompt tokens cached")
    assert report(samples[2:]) == "1 requests, none answered"
