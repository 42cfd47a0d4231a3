"""Processes die by kill -9 under a request: the client's answer is complete and the same, or a typed error in time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.types import ClusterStatus, WorkerState
from modelfiles.model import open_model
from tests.support.cluster import MODEL, ProcessCluster
from tests.support.prompts import of_length
from tests.support.stream import NUM_TOKENS, PROMPT, Stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
KILL_POINTS = {
    "decode-0": ("decode.admit", "decode.reserved", "decode.opened", "decode.granted", "decode.fetched"),
    "prefill-0": ("prefill.queued", "prefill.computing", "prefill.seal", "prefill.sealed"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessCluster]:
    """Every kill point is configured, and acts only when its file exists."""
    arm = tmp_path_factory.mktemp("arm")
    actions = {p: f"when:{arm / p}:kill" for points in KILL_POINTS.values() for p in points}
    actions["worker.step"] = f"when:{arm / 'worker.step'}:pause:60"
    async with ProcessCluster(tmp_path_factory.mktemp("logs"), f"failpoints={json.dumps(actions)}") as cluster:
        cluster.arm = arm  # type: ignore[attr-defined]
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: ProcessCluster) -> list[int]:
    stream = await Stream(cluster, temperature=0).read()
    assert len(stream.token_ids) == NUM_TOKENS
    return stream.token_ids


async def _incarnation(cluster: ProcessCluster, worker_id: str) -> int:
    return (await cluster.worker(worker_id)).registration.incarnation


async def _wait_back(cluster: ProcessCluster, worker_id: str, before: int) -> None:
    def is_back(status: ClusterStatus) -> bool:
        return any(
            w.registration.worker_id == worker_id
            and w.registration.incarnation != before
            and w.state is WorkerState.READY
            for w in status.workers
        )

    await cluster.wait_for(f"{worker_id} to come back", is_back, 60)


async def test_the_decode_worker_dies_in_mid_stream(cluster: ProcessCluster, undisturbed: list[int]) -> None:
    before = await _incarnation(cluster, "decode-0")
    stream = await Stream(cluster, temperature=0).read(on_tokens=5, then=lambda: cluster.kill("decode-0"))
    assert stream.error is None
    assert stream.token_ids == undisturbed
    assert stream.usage is not None and stream.usage["completion_tokens"] == NUM_TOKENS
    assert await _incarnation(cluster, "decode-0") != before, "a restarted worker is a new incarnation"
    assert (await Stream(cluster, temperature=0).read()).token_ids == undisturbed
    await cluster.wait_idle()


async def test_the_prefill_worker_dies_in_mid_prefill(cluster: ProcessCluster) -> None:
    prompt = of_length(open_model(MODEL).tokenizer(), 1500)
    expected = (await cluster.complete(prompt, max_tokens=6, ignore_eos=True))["choices"][0]["token_ids"]
    before = await _incarnation(cluster, "prefill-0")
    armed: Path = cluster.arm / "worker.step"  # type: ignore[attr-defined]
    armed.touch()  # the next step stops where it begins: it is P's, D has nothing to compute
    # Another salt: with the first run's blocks cached there would be hardly a prefill to die in.
    asked = asyncio.create_task(cluster.complete(prompt, max_tokens=6, ignore_eos=True, cache_salt="another"))

    await cluster.wait_for("a step of the prefill", lambda _: not armed.exists(), 20)
    assert not asked.done()
    cluster.kill("prefill-0")
    assert (await asked)["choices"][0]["token_ids"] == expected
    await _wait_back(cluster, "prefill-0", before)  # the answer may have come without it
    await cluster.wait_idle()


@pytest.mark.parametrize(
    ("worker", "point"), [(worker, point) for worker, points in KILL_POINTS.items() for point in points]
)
async def test_a_worker_dies_at(cluster: ProcessCluster, undisturbed: list[int], worker: str, point: str) -> None:
    before = await _incarnation(cluster, worker)
    armed: Path = cluster.arm / point  # type: ignore[attr-defined]
    armed.touch()
    stream = await Stream(cluster, temperature=0).read()
    assert not armed.exists(), "the kill point was passed"
    assert stream.error is None and stream.token_ids == undisturbed

    await _wait_back(cluster, worker, before)
    await cluster.wait_idle()


async def test_an_unseeded_text_only_ever_extends(cluster: ProcessCluster) -> None:
    texts: list[str] = []
    stream = Stream(cluster, temperature=1.0)

    def kill() -> None:
        texts.append(stream.text)
        cluster.kill("decode-0")

    await stream.read(on_tokens=6, then=kill)
    assert stream.error is None
    assert stream.text.startswith(texts[0]) and texts[0]
    assert len(stream.token_ids) == NUM_TOKENS, "accepted tokens count, they are not generated again"
    assert stream.usage is not None and stream.usage["completion_tokens"] == NUM_TOKENS
    await cluster.wait_idle()


async def test_a_killed_gateway_leaves_nothing_running(cluster: ProcessCluster) -> None:
    streams = [asyncio.create_task(Stream(cluster, temperature=0, max_tokens=400).read()) for _ in range(8)]

    def has_running(status: ClusterStatus) -> bool:
        return any(w.registration.worker_id == "decode-0" and w.load.num_running >= 4 for w in status.workers)

    await cluster.wait_for("running streams", has_running, 60)
    cluster.kill("gateway")
    killed_at = time.monotonic()

    def is_quiet(status: ClusterStatus) -> bool:
        return all(
            w.load.num_running == w.load.num_waiting == w.load.num_leases == 0 and w.load.blocks.is_idle()
            for w in status.workers
        )

    await cluster.wait_for("no request on any worker", is_quiet, 10)
    assert time.monotonic() - killed_at < 2.5, "2 s, and a heartbeat to see it"
    await asyncio.gather(*streams, return_exceptions=True)
    await cluster.wait_ready(60)
    await cluster.complete(PROMPT, max_tokens=2)
    await cluster.wait_idle()
