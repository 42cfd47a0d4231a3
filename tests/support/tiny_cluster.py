"""A process cluster around a model of a few thousand weights, so that what is loaded is the hand-off; and its load."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.types import ClusterStatus, WorkerState
from deploy.cluster import FREE_PORTS
from deploy.launcher import ComponentSpec, RestartPolicy
from tests.support.cluster import ProcessCluster
from tests.support.tiny_model import CONFIG, write_folder

TINY = "tiny"
_VOCABULARY = range(2, 250)


def tiny_settings(folder: Path) -> tuple[str, ...]:
    """Settings that serve the model, written to ``folder``. No prefix cache: every prompt is computed and moved."""
    write_folder(folder / TINY, config={**CONFIG, "max_position_embeddings": 2048})
    return (
        f"models.0.path={folder / TINY}",
        f"models.0.name={TINY}",
        "models.0.max_context=2048",
        "models.0.kv.prefix_cache=false",
        "router.heartbeat_timeout_s=4",
        "router.max_wait_s=300",  # a slow machine refuses nobody: who has to wait, waits
    )


class FixedPorts:
    """An ``Edit``: a worker has the same address at each of its starts, and is restarted without a pause."""

    def __init__(self) -> None:
        self._ports = iter(random.sample(FREE_PORTS, 100))
        self.addresses: dict[str, str] = {}

    def __call__(self, spec: ComponentSpec) -> ComponentSpec:
        if "worker" not in spec.argv:
            return spec
        config = json.loads(spec.argv[-1])
        config["worker"]["port"] = next(self._ports)
        self.addresses[spec.name] = f"{config['worker']['host']}:{config['worker']['port']}"
        return replace(spec, argv=(*spec.argv[:-1], json.dumps(config)), restart=RestartPolicy(initial_s=0, max_s=0))


@dataclass(slots=True, kw_only=True)
class Question:
    prompt: list[int]
    num_tokens: int
    answer: list[int] = field(default_factory=list)


def questions(seed: int, count: int, *, longest: int, num_tokens: int) -> list[Question]:
    choose = random.Random(seed)
    return [
        Question(
            prompt=[choose.choice(_VOCABULARY) for _ in range(choose.randint(1, longest))],
            num_tokens=choose.randint(2, num_tokens),
        )
        for _ in range(count)
    ]


async def ask(cluster: ProcessCluster, question: Question, **fields: Any) -> dict[str, Any]:
    return await cluster.complete(
        question.prompt, model=TINY, max_tokens=question.num_tokens, ignore_eos=True, **fields
    )


async def learn(cluster: ProcessCluster, asked: list[Question]) -> None:
    """The right answers, while nothing disturbs."""
    for question, answer in zip(asked, await asyncio.gather(*[ask(cluster, one) for one in asked]), strict=True):
        question.answer = answer["choices"][0]["token_ids"]
        assert len(question.answer) == question.num_tokens


class Load:
    """``async with``: so many callers, each asking one question after the other. Right answers and errors are counted;
    a wrong answer fails the test. A share of the callers hangs up before the answer, after up to ``patience_s``."""

    def __init__(
        self,
        cluster: ProcessCluster,
        asked: list[Question],
        num_callers: int,
        *,
        seed: int,
        share_given_up: float = 0.0,
        patience_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._asked = asked
        self._choose = random.Random(seed)
        self._num_callers = num_callers
        self._share_given_up = share_given_up
        self._patience_s = patience_s
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()
        self.timings: list[dict[str, float]] = []
        """Stages in ms."""

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._call()) for _ in range(self._num_callers)]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """No new questions; waits for the last answers."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _call(self) -> None:
        while not self._is_over:
            gives_up = self._choose.random() < self._share_given_up
            try:
                async with asyncio.timeout(self._choose.uniform(0.0, self._patience_s) if gives_up else None):
                    await self._one()
            except TimeoutError:
                self.counts["given up"] += 1

    async def _one(self) -> None:
        question = self._choose.choice(self._asked)
        body = {
            "model": TINY,
            "prompt": question.prompt,
            "temperature": 0,
            "max_tokens": question.num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await self._cluster.http.post("/v1/completions", json=body, headers={"x-baton-timing": "1"})
        content = answer.json()
        if answer.status_code != 200:
            self.counts[content["error"]["code"]] += 1
            return
        assert content["choices"][0]["token_ids"] == question.answer, "a wrong answer"
        self.counts["right"] += 1
        self.timings.append(content["timing"]["stages_ms"])


async def incarnation(cluster: ProcessCluster, worker_id: str) -> int:
    return (await cluster.worker(worker_id)).registration.incarnation


async def wait_new(cluster: ProcessCluster, worker_id: str, old: int) -> int:
    """The incarnation that is ready after ``old``."""

    def is_new(status: ClusterStatus) -> bool:
        return any(
            w.registration.worker_id == worker_id and w.registration.incarnation != old and w.state is WorkerState.READY
            for w in status.workers
        )

    await cluster.wait_for(f"a new {worker_id}", is_new, 120)
    return await incarnation(cluster, worker_id)
