"""A decode worker dies by kill -9 with a hand-off in its hands: another one fetches it, the prompt is computed once."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import Question, ask, learn, questions, tiny_settings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
KILL_POINTS = ("decode.granted", "decode.fetched")
POOLS = "{prefill: {max_step_tokens: 128}, decode: {replicas: 2}}"


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, arm: Path) -> AsyncIterator[ProcessCluster]:
    """Whichever decode worker first comes to an armed point dies there."""
    settings = (
        *tiny_settings(tmp_path_factory.mktemp("model")),
        f"models.0.pools={POOLS}",
        f"failpoints={json.dumps({point: f'when:{arm / point}:kill' for point in KILL_POINTS})}",
    )
    async with ProcessCluster(tmp_path_factory.mktemp("logs"), *settings) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(cluster: ProcessCluster) -> Question:
    (question,) = questions(5, 1, longest=900, num_tokens=12)
    await learn(cluster, [question])
    return question


async def _prompt_tokens(cluster: ProcessCluster, what: str) -> int:
    """A counter of the prefill worker, as of now."""
    address = (await cluster.worker("prefill-0")).registration.http_address
    text = (await cluster.http.get(f"http://{address}/metrics")).text
    line = next(line for line in text.splitlines() if line.startswith(f"baton_prompt_tokens_{what}_total{{"))
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("point", KILL_POINTS)
async def test_the_prompt_is_computed_once(cluster: ProcessCluster, asked: Question, arm: Path, point: str) -> None:
    computed, refetched = [await _prompt_tokens(cluster, what) for what in ("computed", "refetched")]
    (arm / point).touch()
    answer = await ask(cluster, asked)
    assert not (arm / point).exists(), "the kill point was passed"
    assert answer["choices"][0]["token_ids"] == asked.answer
    await cluster.wait_idle(60)
    assert await _prompt_tokens(cluster, "computed") == computed + len(asked.prompt), "once"
    assert await _prompt_tokens(cluster, "refetched") == refetched + len(asked.prompt)
    await cluster.wait_ready(90)
