"""Several choices of one request, asked of the workers' own services: one prefill, one transfer, and every choice is
what it would be alone."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from core import types as t
from core.errors import Cancelled, InvalidRequest, WorkerLost
from core.grammar import GrammarKind, GrammarSource
from core.ids import GatewayId, HandoffId, Incarnation, RequestId
from engine.engine import Engine, EngineConfig
from kvtransfer.backends.inproc import Fabric
from rpc.clients import DecodeClient, PrefillClient
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.random_llama import RandomLlama

GATEWAY, INCARNATION = GatewayId("asker"), Incarnation(77)
BLOCK_SIZE = 4
LIMIT_S = 30.0
pytestmark = pytest.mark.timeout(120)


def prompt(length: int, seed: int = 5) -> tuple[int, ...]:
    return tuple(3 + (seed + 7 * index) % 90 for index in range(length))


@dataclass
class Answer:
    """What a gateway is told of one attempt, repeats dropped."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, t.FinishReason] = field(default_factory=dict)
    stages: dict[int, t.StageTimes] = field(default_factory=dict)
    failed: str = ""
    logprobs: dict[int, list[t.TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))

    def take(
        self,
        choice: int,
        first_index: int,
        token_ids: tuple[int, ...],
        start: int,
        logprobs: tuple[t.TokenLogprobs, ...] = (),
    ) -> None:
        have = self.tokens[choice]
        assert first_index - start <= len(have), "a gap"
        num_known = len(have) - (first_index - start)
        have += token_ids[num_known:]
        self.logprobs[choice] += logprobs[num_known:]


class Asker:
    """Drives both legs of requests as a gateway would."""

    def __init__(self, cluster: LocalCluster, decode: str) -> None:
        self.cluster = cluster
        self.p, self.d = cluster.workers.get("prefill-0"), cluster.workers[decode]
        self.to_decode = DecodeClient(self._address(self.d))
        self.to_prefill = None if self.p is None else PrefillClient(self._address(self.p))
        self.answers: dict[tuple[str, int], Answer] = {}
        self.starts: dict[tuple[str, int], int] = {}
        self.moved = asyncio.Event()
        self._number = 0

    @staticmethod
    def _address(worker: Any) -> t.WorkerAddress:
        context = worker.context
        return t.WorkerAddress(worker_id=context.worker_id, incarnation=context.incarnation, address=worker.address)

    async def listen(self, ready: asyncio.Event) -> None:
        with suppress(WorkerLost):
            async for message in self.to_decode.outputs(GATEWAY, INCARNATION):
                ready.set()
                for chunk in message.chunks:
                    key = (chunk.request_id, chunk.attempt)
                    answer = self.answers[key]
                    answer.take(chunk.choice, chunk.first_index, chunk.token_ids, self.starts[key], chunk.logprobs)
                    if chunk.finish_reason is not None:
                        answer.finished[chunk.choice] = chunk.finish_reason
                        assert chunk.stages is not None
                        answer.stages[chunk.choice] = chunk.stages
                for failed in message.failed:
                    self.answers[failed.request_id, failed.attempt].failed = failed.slug
                self.moved.set()

    def request(
        self,
        tokens: tuple[int, ...],
        choices: tuple[int, ...],
        *,
        accepted: tuple[int, ...] = (),
        request_id: str = "",
        attempt: int = 1,
        **sampling: Any,
    ) -> t.GenerateRequest:
        self._number += 1
        options = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True, "n": 5, **sampling}
        return t.GenerateRequest(
            request_id=RequestId(request_id or f"r{self._number}"),
            model=MODEL,
            prompt_token_ids=tokens,
            sampling=t.SamplingParams(**options),
            choices=tuple(t.ChoiceProgress(choice=choice, accepted=accepted) for choice in choices),
            attempt=attempt,
            gateway_id=GATEWAY,
            gateway_incarnation=INCARNATION,
            deadline_s=LIMIT_S,
        )

    async def start(self, request: t.GenerateRequest, mode: t.Mode = t.Mode.SPLIT) -> t.PrefillReply | None:
        """Both legs, up to P's answer."""
        key = (request.request_id, request.attempt)
        answer = self.answers[key] = Answer()
        start = self.starts[key] = len(request.choices[0].accepted)
        handoff_id = HandoffId(f"{request.request_id}-{request.attempt}")
        await self.to_decode.admit(
            t.AdmitRequest(
                request=request,
                handoff_id=handoff_id,
                mode=mode,
                worker_incarnation=self.d.context.incarnation,
                prefill=None if mode is t.Mode.LOCAL or self.p is None else self._address(self.p),
            )
        )
        if mode is t.Mode.LOCAL:
            return None
        assert self.to_prefill is not None and self.p is not None
        reply = await self.to_prefill.prefill(
            t.PrefillRequest(request=request, handoff_id=handoff_id, worker_incarnation=self.p.context.incarnation)
        )
        for first in reply.first_tokens:
            logprobs = () if first.logprobs is None else (first.logprobs,)
            answer.take(first.choice, first.index, (first.token_id,), start, logprobs)
            if first.finish_reason is not None:
                answer.finished[first.choice] = first.finish_reason
        return reply

    async def ask(self, request: t.GenerateRequest, mode: t.Mode = t.Mode.SPLIT) -> Answer:
        await self.start(request, mode)
        return await self.rest(request)

    async def rest(self, request: t.GenerateRequest) -> Answer:
        answer = self.answers[request.request_id, request.attempt]
        await self.until(lambda: len(answer.finished) == len(request.choices) or bool(answer.failed))
        assert not answer.failed
        return answer

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.moved.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.moved.wait()

    async def until_idle(self) -> None:
        """Laws 1 and 2 on both workers."""
        workers = [worker for worker in (self.p, self.d) if worker is not None]
        await self.until(lambda: all(worker.role.is_idle() for worker in workers))
        for worker in workers:
            counts = worker.context.engine.pool.counts()
            assert counts.is_conserved() and counts.is_idle(), (worker.context.worker_id, counts)
            assert not worker.context.engine.has_work


ENGINE: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_step_tokens": 64, "max_sequences": 8}


async def _asker(*settings: str, decode: str = "decode-0", **changes: Any) -> AsyncIterator[Asker]:
    fabric = Fabric()
    names = ["decode-0", "prefill-0"] if decode == "decode-0" else [decode]
    engines = {name: Engine(RandomLlama(), EngineConfig(**{**ENGINE, **changes})) for name in names}
    async with LocalCluster(
        lambda worker_id: fabric.backend(), "transfer.backend=inproc", *settings, engines=engines
    ) as cluster:
        asker, ready = Asker(cluster, decode), asyncio.Event()
        listening = asyncio.create_task(asker.listen(ready))
        await ready.wait()
        yield asker
        await asker.until_idle()
        await asker.to_decode.close()
        if asker.to_prefill is not None:
            await asker.to_prefill.close()
        await asyncio.wait({listening})


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    async for asker in _asker():
        yield asker


@pytest.fixture(params=[True, False], ids=["cached", "uncached"])
async def local(request: pytest.FixtureRequest) -> AsyncIterator[Asker]:
    settings = "models.0.pools={unified: {}}"
    async for asker in _asker(settings, decode="unified-0", prefix_cache=request.param):
        yield asker


async def alone(asker: Asker, tokens: tuple[int, ...], mode: t.Mode = t.Mode.SPLIT, **sampling: Any) -> list[list[int]]:
    """Every choice by a request of its own."""
    answers = [await asker.ask(asker.request(tokens, (choice,), **sampling), mode) for choice in range(5)]
    return [answer.tokens[choice] for choice, answer in enumerate(answers)]


# -- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 8, 10, 13])
async def test_one_prefill_and_one_transfer_give_each_choice_what_it_is_alone(asker: Asker, length: int) -> None:
    assert asker.p is not None
    before = [worker.context.engine.counters() for worker in (asker.p, asker.d)]
    moved = dict(asker.d.load().kv_bytes_received)["inproc"]
    request = asker.request(prompt(length), (0, 1, 2, 3, 4))
    reply = await asker.start(request)
    assert reply is not None and [first.choice for first in reply.first_tokens] == [0, 1, 2, 3, 4]
    together = await asker.rest(request)
    after = [worker.context.engine.counters() for worker in (asker.p, asker.d)]
    # The other four choices compute the last token of the prompt again.
    assert after[0].prompt_tokens_computed - before[0].prompt_tokens_computed == length + 4
    assert after[1].prompt_tokens_computed == before[1].prompt_tokens_computed
    geometry = asker.d.context.geometry
    received = dict(asker.d.load().kv_bytes_received)["inproc"] - moved
    assert received == geometry.blocks_for(length) * geometry.block_bytes
    await asker.until_idle()
    expected = await alone(asker, prompt(length))
    assert len({tuple(tokens) for tokens in expected}) > 1, "choices differ"
    assert [together.tokens[choice] for choice in range(5)] == expected
    assert set(together.finished.values()) == {t.FinishReason.LENGTH}


@pytest.mark.parametrize("length", [1, 8, 10])
async def test_choices_of_a_prompt_that_d_reads_itself(local: Asker, length: int) -> None:
    before = local.d.context.engine.counters().prompt_tokens_computed
    together = await local.ask(local.request(prompt(length), (0, 1, 2, 3, 4)), t.Mode.LOCAL)
    assert local.d.context.engine.counters().prompt_tokens_computed - before == length + 4
    await local.until_idle()
    expected = await alone(local, prompt(length), t.Mode.LOCAL)
    assert [together.tokens[choice] for choice in range(5)] == expected


async def test_choices_resume_separately_from_what_was_accepted(asker: Asker) -> None:
    whole = await asker.ask(asker.request(prompt(10), (0, 1, 2), request_id="whole"))
    rest = [
        asker.request(
            prompt(10), (choice,), accepted=tuple(whole.tokens[choice][:kept]), request_id="again", attempt=2 + choice
        )
        for choice, kept in enumerate((1, 5, 8))
    ]
    resumed = await asyncio.gather(*[asker.ask(request) for request in rest])
    for choice, kept in enumerate((1, 5, 8)):
        assert resumed[choice].tokens[choice] == whole.tokens[choice][kept:]


async def test_some_choices_of_several_may_be_asked_for_again(asker: Asker) -> None:
    """Those that had no token yet when their worker was lost; the others were over."""
    expected = await alone(asker, prompt(9))
    again = await asker.ask(asker.request(prompt(9), (4, 1), attempt=2))
    assert {choice: tokens for choice, tokens in again.tokens.items()} == {4: expected[4], 1: expected[1]}


@pytest.mark.parametrize("mode", t.Mode)
async def test_every_choice_follows_the_grammar_from_its_start(asker: Asker, mode: t.Mode) -> None:
    grammar = GrammarSource(kind=GrammarKind.REGEX, source="[A-D]{3}[K-N]{3}").encode()
    options: dict[str, Any] = {"grammar": grammar, "ignore_eos": False, "eos_token_ids": (2,), "seed": 3}
    answer = await asker.ask(asker.request(prompt(10), (0, 1, 2), **options), mode)
    texts = [bytes(token for token in answer.tokens[choice] if token != 2).decode() for choice in range(3)]
    assert all(re.fullmatch("[A-D]{3}[K-N]{3}", text) for text in texts), texts
    assert len(set(texts)) > 1


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leader_ends", [True, False])
async def test_a_choice_that_ends_at_its_first_token_is_not_run_and_told_whole(asker: Asker, leader_ends: bool) -> None:
    tokens = await alone(asker, prompt(10))
    ends = tokens[0][0] if leader_ends else next(each[0] for each in tokens if each[0] != tokens[0][0])
    over = [choice for choice in range(5) if tokens[choice][0] == ends]
    assert 0 < len(over) < 5 and (0 in over) is leader_ends
    request = asker.request(prompt(10), (0, 1, 2, 3, 4), stop_token_ids=(ends,))
    reply = await asker.start(request)
    assert reply is not None
    assert [first.choice for first in reply.first_tokens if first.finish_reason is not None] == over
    answer = await asker.rest(request)
    await asker.until(lambda: len(answer.stages) == 5)  # D tells of all of them, also when P is gone by then
    for choice in range(5):
        expected = tokens[choice]
        if ends in expected:
            expected = expected[: expected.index(ends) + 1]
        assert answer.tokens[choice] == expected
        stopped = t.FinishReason.STOP if ends in expected else t.FinishReason.LENGTH
        assert answer.finished[choice] is stopped


async def test_a_leader_that_ends_at_its_first_token_leaves_the_prompt_to_the_others(local: Asker) -> None:
    tokens = await alone(local, prompt(10), t.Mode.LOCAL)
    request = local.request(prompt(10), (0, 1, 2, 3, 4), stop_token_ids=(tokens[0][0],))
    answer = await local.ask(request, t.Mode.LOCAL)
    assert answer.tokens[0] == tokens[0][:1]
    assert any(len(answer.tokens[choice]) > 1 for choice in range(1, 5))


async def test_when_every_choice_ends_at_its_first_token_nothing_is_handed_off(asker: Asker) -> None:
    assert asker.p is not None
    request = asker.request(prompt(10), (0, 1, 2), max_tokens=1)
    reply = await asker.start(request)
    assert reply is not None and {first.finish_reason for first in reply.first_tokens} == {t.FinishReason.LENGTH}
    assert asker.p.context.engine.pool.counts().leased == 0
    ended = t.AbortRequest(request_id=request.request_id, attempt=1, reason="over")
    await asker.to_decode.abort(ended)


@pytest.mark.parametrize("failpoint", ["prefill.queued", "prefill.computing", "prefill.forked", "prefill.seal"])
async def test_an_abort_at_p_gives_every_block_back(asker: Asker, failpoint: str) -> None:
    assert asker.p is not None and asker.to_prefill is not None
    failpoints = asker.p.context.failpoints
    failpoints.set(failpoint, f"pause:{LIMIT_S}")
    request = asker.request(prompt(10), (0, 1, 2))
    asking = asyncio.create_task(asker.start(request))
    await asker.until(lambda: failpoints.num_hits(failpoint) == 1)
    gone = t.AbortRequest(request_id=request.request_id, attempt=1, reason="gone")
    aborting = asyncio.create_task(asker.to_prefill.abort(gone))
    await asyncio.wait({aborting}, timeout=0.1)
    failpoints.set(failpoint, "")
    with suppress(Cancelled):
        await asking
    await aborting
    await asker.to_decode.abort(gone)


async def test_an_abort_at_d_ends_all_choices(asker: Asker) -> None:
    request = asker.request(prompt(10), (0, 1, 2), max_tokens=200)
    await asker.start(request)
    answer = asker.answers[request.request_id, 1]
    await asker.until(lambda: all(len(answer.tokens[choice]) > 3 for choice in range(3)))
    gone = t.AbortRequest(request_id=request.request_id, attempt=1, reason="gone")
    assert (await asker.to_decode.abort(gone)).found
    assert asker.d.context.engine.pool.counts().in_use == 0


async def test_an_abort_at_d_around_the_fork_leaves_nothing(local: Asker) -> None:
    """Before the first choice has paused, while the others are forked from it, and after."""
    for ticks in range(0, 60, 4):
        request = local.request(prompt(10), (0, 1, 2), max_tokens=200)
        await local.start(request, t.Mode.LOCAL)
        for _ in range(ticks):
            await asyncio.sleep(0)
        gone = t.AbortRequest(request_id=request.request_id, attempt=1, reason="gone")
        assert (await local.to_decode.abort(gone)).found
        assert local.d.context.engine.pool.counts().is_idle()


async def test_a_choice_that_nobody_reads_any_more_is_given_up_alone(asker: Asker) -> None:
    expected = await alone(asker, prompt(10), max_tokens=30)
    for mode, given_up in ((mode, choice) for mode in t.Mode for choice in (0, 2)):
        request = asker.request(prompt(10), (0, 1, 2), max_tokens=30)
        before = asker.d.context.engine.counters().tokens_generated
        await asker.start(request, mode)
        unread = t.AbortRequest(request_id=request.request_id, attempt=1, reason="stop", choices=(given_up,))
        assert (await asker.to_decode.abort(unread)).found
        answer = asker.answers[request.request_id, 1]
        await asker.until(lambda answer=answer: len(answer.finished) == 2)
        for choice in {0, 1, 2} - {given_up}:
            assert answer.tokens[choice] == expected[choice]
        assert len(answer.tokens[given_up]) < 30
        await asker.until_idle()
        assert asker.d.context.engine.counters().tokens_generated - before < 3 * 30


async def through_the_gateway(asker: Asker, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 12, "temperature": 1, "seed": 11, "ignore_eos": True, **fields}
    choices: list[dict[str, Any]] = (await asker.cluster.complete(list(prompt(10)), **body))["choices"]
    return choices


async def test_the_gateway_asks_for_the_same_choices_in_one_attempt(asker: Asker) -> None:
    choices = await through_the_gateway(asker, n=5)
    assert [choice["token_ids"] for choice in choices] == await alone(asker, prompt(10))
    stop = choices[0]["text"][3:5]
    stopped = await through_the_gateway(asker, n=5, stop=[stop])
    for before, after in zip(choices, stopped, strict=True):
        assert after["text"] == before["text"].partition(stop)[0]
        assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")


@pytest.mark.parametrize("mode", t.Mode)
async def test_choices_that_cannot_share_a_prompt_are_refused(asker: Asker, mode: t.Mode) -> None:
    for numbers in ((0, 0), (0, 5)):
        with pytest.raises(InvalidRequest, match="not distinct numbers below n = 5"):
            await asker.ask(asker.request(prompt(5), numbers), mode)
    both = asker.request(prompt(5), (0, 1))
    apart = (t.ChoiceProgress(choice=0, accepted=(7,)), t.ChoiceProgress(choice=1, accepted=(8,)))
    with pytest.raises(InvalidRequest, match="resumed by attempts of their own"):
        await asker.ask(replace(both, choices=apart), mode)


# -- blocks that several leases share ---------------------------------------------------------------------------------


async def test_blocks_under_several_leases_are_reusable_when_the_last_lease_has_ended(asker: Asker) -> None:
    """Two hand-offs of one prompt: its complete blocks are leased twice, the tails once each."""
    assert asker.p is not None and asker.to_prefill is not None
    pool = asker.p.context.engine.pool
    replies = []
    for name in ("one", "two"):
        request = asker.request(prompt(10), (0, 1, 2), request_id=name)
        replies.append(
            await asker.to_prefill.prefill(
                t.PrefillRequest(
                    request=request, handoff_id=HandoffId(name), worker_incarnation=asker.p.context.incarnation
                )
            )
        )
    assert replies[0].first_tokens == replies[1].first_tokens
    assert [reply.num_cached_tokens for reply in replies] == [0, 8]
    exports = asker.p.role.exports._exports  # type: ignore[attr-defined]
    blocks = [exports[name].grant.block_ids for name in ("one", "two")]
    assert blocks[0][:2] == blocks[1][:2] and blocks[0][2] != blocks[1][2]
    assert pool.counts().leased == 4

    async def end(name: str) -> None:
        assert asker.to_prefill is not None
        assert (await asker.to_prefill.abort(t.AbortRequest(request_id=RequestId(name), attempt=1, reason="x"))).found

    await end("one")
    assert pool.counts().leased == 3
    taken = pool.allocate(pool.counts().free + pool.counts().cached)  # all that can be reused
    assert not set(taken) & set(blocks[1])
    await end("two")
    assert pool.counts().leased == 0 and pool.num_unpromised == 3
    pool.free(taken)
