"""A control message that is lost on a stream that lives costs one renewal time, not the request's deadline."""

from __future__ import annotations

from typing import Any

import pytest

from bench.virtual.loop import VirtualLoop
from bench.virtual.network import Pipe
from core.handoff import Claim, Open, Ready, Sealed
from tests.support.virtual.cluster import Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import answer_to
from tests.support.virtual.worker import VirtualWorker

PROMPT = tuple(range(3, 43))
RENEW_S = make_config().transfer.renew_s


class Lossy(Hooks):
    """The first ``num`` messages of a kind are lost."""

    def __init__(self, kind: type, num: int = 1) -> None:
        self.kind, self.num_left = kind, num
        self.num_lost = 0
        self.kills_at = ""
        self.cluster: VirtualCluster

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        if isinstance(message, self.kind) and self.num_lost < self.num_left:
            self.num_lost += 1
            return []
        return [(message, 0.0)]

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == self.kills_at:
            self.kills_at = ""
            self.cluster.loop.call_later(0.0, self.cluster.kill, worker)


def _answer(hooks: Lossy, *, num_decodes: int = 1) -> float:
    """Until a request is answered; nothing is left then."""
    loop, took_s = VirtualLoop(), 0.0

    async def main() -> None:
        nonlocal took_s
        hooks.cluster = cluster = VirtualCluster(config=make_config(), hooks=hooks, seed=0)
        prefill = cluster.start("prefill-0", num_blocks=24)
        for number in range(num_decodes):
            cluster.start(f"decode-{number}", num_blocks=24)
        asked = cluster.ask(PROMPT, max_tokens=4)
        assert await cluster.until(lambda: asked.is_over, 20.0)
        took_s = loop.time()
        assert asked.error is None and asked.tokens == answer_to(PROMPT, 4)
        assert asked.run.attempt == num_decodes and prefill.engine.num_computed == len(PROMPT)
        assert await cluster.until(lambda: all(worker.is_idle() for worker in cluster.alive), 1.0)
        await cluster.close()

    loop.run(main())
    assert not loop.errors and hooks.num_lost
    return took_s


@pytest.mark.parametrize("kind", [Open, Ready, Sealed])
@pytest.mark.parametrize("num", [1, 2])
def test_what_is_not_answered_is_asked_again(kind: type, num: int) -> None:
    assert _answer(Lossy(kind, num)) < num * RENEW_S + 0.5


@pytest.mark.parametrize("kind", [Claim, Sealed])
def test_so_is_a_claim_of_what_is_held(kind: type) -> None:
    hooks = Lossy(kind)
    hooks.kills_at = "decode.opened" if kind is Sealed else "decode.granted"
    assert _answer(hooks, num_decodes=2) < 2 * RENEW_S + 0.5
