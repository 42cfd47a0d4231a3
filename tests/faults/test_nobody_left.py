"""No worker is left and none comes back in time: one typed error, within the deadline, and nothing stays behind."""

import time
from pathlib import Path

import pytest

from core.types import Role
from deploy.cluster import worker_spec
from tests.support.cluster import MODEL, ProcessCluster
from tests.support.stream import Stream

DEADLINE_S = 8.0
pytestmark = pytest.mark.timeout(300)


async def test_a_typed_error_comes_within_the_deadline(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, f"gateway.limits.request_timeout_s={DEADLINE_S}") as cluster:
        await cluster.complete("Hello", max_tokens=2)

        # In mid-stream: what was sent stands, then the error, within the stream.
        stopped = []
        stream = Stream(cluster, temperature=0, max_tokens=2000)
        started = time.monotonic()
        await stream.read(on_tokens=4, then=lambda: stopped.append(cluster.stop_later("decode-0")))
        took_s = time.monotonic() - started
        assert stream.error is not None and stream.error["code"] in ("no_worker", "deadline_exceeded"), stream.error
        assert len(stream.token_ids) >= 4 and stream.finish_reason is None
        assert took_s < DEADLINE_S + 0.5
        await stopped[0]

        # From the start: a true status, no stream.
        started = time.monotonic()
        answer = await cluster.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "stream": True})
        assert time.monotonic() - started < DEADLINE_S + 0.5
        assert answer.status_code in (503, 504)
        assert "decode" in answer.json()["error"]["message"], "it names what is missing"
        assert (await cluster.http.get("/ready")).status_code == 503
        assert (await cluster.http.get("/health")).status_code == 200

        await cluster.launcher.start(worker_spec(cluster.config, cluster.config.models[0], Role.DECODE, 0))
        await cluster.wait_ready(60)
        await cluster.complete("Hello", max_tokens=2)
        await cluster.wait_idle()
