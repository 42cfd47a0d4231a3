"""Both pools full at once: a request that has room at one side waits for none that has room at the other only.

The clusters are virtual: real roles, pools, leases and transfers, and a clock that jumps. The router here places at
once and at random, so it is the workers alone that must not lock.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.virtual.loop import VirtualLoop
from tests.support.virtual.cluster import Answer, Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import VOCAB, answer_to
from tests.support.virtual.worker import VirtualWorker

NUM_BLOCKS, BLOCK_SIZE = 12, 4
LEASE_S = make_config().transfer.lease_s


def prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(num_tokens))


class FirstPromptIsLate(Hooks):
    """The first prompt reaches its prefill worker after the second, and its decode worker before it."""

    def __init__(self) -> None:
        self.num_queued = 0

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == "prefill.queued":
            self.num_queued += 1
            if self.num_queued == 1:
                await asyncio.sleep(0.3)


class AnyOrder(Hooks):
    """Calls are late by any time that a network may take."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name in ("prefill.queued", "decode.admit"):
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.02, 0.2)))


async def end_right(cluster: VirtualCluster, answers: list[Answer], within_s: float) -> None:
    assert await cluster.until(lambda: all(answer.is_over for answer in answers), within_s), [
        (answer.request.request_id, answer.is_over) for answer in answers
    ]
    for answer in answers:
        assert answer.error is None, answer.error
        request = answer.request
        assert answer.tokens == answer_to(request.prompt_token_ids, request.sampling.max_tokens)
    assert await cluster.until(lambda: all(worker.is_idle() for worker in cluster.alive), 2.0), "something is left"
    await cluster.close()


def test_the_room_that_one_side_gave_is_not_waited_for_by_who_holds_the_other() -> None:
    """The lock-step: A has the decode worker's room and waits for the prefill worker's, B the other way round."""
    loop = VirtualLoop()

    async def main() -> None:
        cluster = VirtualCluster(config=make_config(), hooks=FirstPromptIsLate(), seed=0)
        cluster.start("prefill-0", num_blocks=NUM_BLOCKS)
        cluster.start("decode-0", num_blocks=NUM_BLOCKS)
        rng = random.Random(1)
        answers = [cluster.ask(prompt(rng, 38), max_tokens=4) for _ in range(2)]
        await end_right(cluster, answers, LEASE_S / 2)
        assert [answer.run.attempt for answer in answers] == [1, 2], "the one without a reader has made room"

    loop.run(main())
    assert not loop.errors


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(10), id="sample"), pytest.param(range(10, 400), id="all", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("num_pairs", [1, 2])
def test_prompts_as_large_as_the_pools_all_end_right_in_any_order(seeds: range, num_pairs: int) -> None:
    """Split and local, each nearly as large as a pool, more of them than both sides can hold, and messages that come
    when they like. Nobody's deadline or lease has to break a lock."""
    for seed in seeds:
        loop = VirtualLoop()

        async def main(seed: int = seed) -> None:
            cluster = VirtualCluster(config=make_config(), hooks=AnyOrder(seed), seed=seed)
            cluster.router.share_local = 0.25
            for number in range(num_pairs):
                cluster.start(f"prefill-{number}", num_blocks=NUM_BLOCKS)
                cluster.start(f"decode-{number}", num_blocks=NUM_BLOCKS)
            rng = random.Random(seed)
            answers = []
            for _ in range(6 * num_pairs):
                answers.append(cluster.ask(prompt(rng, rng.randint(24, 38)), max_tokens=rng.randint(2, 8)))
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.1)))
            await end_right(cluster, answers, 15.0)

        loop.run(main())
        assert not loop.errors, seed
