"""`baton place` under Kubernetes: the router's sizes become replicas, nobody else's word holds, none is forgotten."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from core.config import ClusterConfig, KubernetesConfig, parse_config
from core.types import PoolSize, Role
from deploy.kubernetes import KubernetesApi, KubernetesPools
from deploy.launcher import LaunchError
from router.service import RouterServer
from rpc.clients import RouterClient
from tests.support.chart import NAMESPACE, RELEASE, render
from tests.support.kube_api import KINDS, KubeApi, Place

MODEL = "qwen3-8b"
PATIENCE_S = 30.0
GROUPS = {"prefill": 2, "decode": 4}
"""Workers of one replica, in values-multinode.yaml."""


@pytest.fixture
def api() -> Iterator[KubeApi]:
    """With the pools of the chart, as they are after the installation."""
    resources = {kind: (version, name) for version, names in KINDS.items() for name, kind in names.items()}
    with KubeApi() as served:
        for one in render("values-multinode.yaml", 'autoscaling.mode="coupled"'):
            if one["kind"] in ("LeaderWorkerSet", "ConfigMap"):
                version, resource = resources[one["kind"]]
                place = Place(version, resource, NAMESPACE, one["metadata"]["name"], None)
                served.put(place, {**one, "metadata": {**one["metadata"]}}, is_new=True, is_dry=False)
        yield served


def _config() -> ClusterConfig:
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 8}}
    return parse_config({"models": [{"name": MODEL, "path": "x", "pools": pools}], "router": {"listen": "127.0.0.1:0"}})


def _kubernetes(api: KubeApi) -> KubernetesConfig:
    return KubernetesConfig(
        release=RELEASE,
        memory=f"{RELEASE}-baton-sizes",
        api=api.url,
        namespace=NAMESPACE,
        token_file=None,
        ca_file=None,
    )


@asynccontextmanager
async def _cell(api: KubeApi) -> AsyncIterator[RouterClient]:
    """A fresh router and a fresh placer."""
    router = RouterServer(_config())
    await router.start()
    calls = KubernetesApi(_kubernetes(api))
    try:
        async with RouterClient(router.address) as client:
            placing = asyncio.create_task(KubernetesPools(_config(), calls).run(client))
            try:
                yield client
            finally:
                placing.cancel()
                await asyncio.gather(placing, return_exceptions=True)
    finally:
        await calls.close()
        await router.stop(0)


def _replicas(api: KubeApi, role: str) -> int:
    one = api.get("LeaderWorkerSet", f"{RELEASE}-baton-{MODEL}-{role}")
    assert one is not None
    return int(one["spec"]["replicas"])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_sizes_of_the_router_become_replicas_and_outlive_both(api: KubeApi) -> None:
    async with _cell(api) as router:
        await _until(lambda: _replicas(api, "decode") == 2)
        assert _replicas(api, "prefill") == 1
        await router.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=9),))
        await _until(lambda: _replicas(api, "decode") == 3)  # groups of four: nine workers need three
        await _until(lambda: "decode" in _memory(api))
    async with _cell(api) as router:
        await _until(lambda: _replicas(api, "decode") == 3)
        async with asyncio.timeout(PATIENCE_S):
            while all(pool.desired != 9 for pool in (await router.status()).pools):
                await asyncio.sleep(0.02)
        assert _replicas(api, "decode") == 3


def _memory(api: KubeApi) -> str:
    one = api.get("ConfigMap", f"{RELEASE}-baton-sizes")
    assert one is not None
    return str(one.get("data"))


async def test_who_else_scales_a_pool_is_overruled_and_it_is_told(
    api: KubeApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.kubernetes.RECHECK_S", 0.05)
    async with _cell(api):
        await _until(lambda: _replicas(api, "decode") == 2)
        one = api.get("LeaderWorkerSet", f"{RELEASE}-baton-{MODEL}-decode")
        assert one is not None
        one["spec"]["replicas"] = 7
        await _until(lambda: _replicas(api, "decode") == 2)
        assert "somebody else has scaled a pool" in caplog.text


async def test_an_api_that_refuses_is_told_with_what_was_asked() -> None:
    with KubeApi() as api:
        calls = KubernetesApi(_kubernetes(api))
        try:
            with pytest.raises(LaunchError, match="GET api/v1/namespaces/llm/configmaps/cell-baton-sizes"):
                await calls.read_memory()
        finally:
            await calls.close()
