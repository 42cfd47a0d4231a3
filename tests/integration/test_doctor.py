"""``baton doctor pair`` on a live cluster: what it finds while requests go on, what it says of a dead pair."""

import asyncio
import json
import socket

import pytest

from baton.doctor import check_pair
from core.errors import PeerLost, StaleIncarnation
from core.ids import Incarnation, WorkerId
from core.types import WorkerAddress
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from kvtransfer.backends.tcp import tcp_backend
from rpc.clients import DecodeClient
from tests.support.local_cluster import LocalCluster
from worker.process import Worker

pytestmark = pytest.mark.timeout(120)


def cluster_of(engines: dict[str, Engine]) -> LocalCluster:
    return LocalCluster(
        lambda worker_id: NixlBackend(), engines=engines, make_fallback=lambda worker_id: tcp_backend("127.0.0.1")
    )


def address(worker: Worker, incarnation: int | None = None) -> WorkerAddress:
    own = worker.context.incarnation
    return WorkerAddress(
        worker_id=worker.context.worker_id, incarnation=Incarnation(incarnation or own), address=worker.address
    )


async def test_a_live_pair_is_measured_by_every_link_while_it_serves(
    engines: dict[str, Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster_of(engines) as cluster:
        await cluster.complete("Rome is", max_tokens=1)  # both workers have joined
        answering = asyncio.create_task(cluster.complete("The capital of France is", max_tokens=24))
        assert await check_pair(cluster.router.address, "prefill-0", "decode-0", as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert await check_pair(cluster.router.address, "prefill-0", "decode-0", as_json=False) == 0
        table = capsys.readouterr().out
        assert len((await answering)["choices"][0]["token_ids"]) == 24
        again = await cluster.complete("The capital of Italy is", max_tokens=2)
        assert len(again["choices"][0]["token_ids"]) == 2
        decode = cluster.workers["decode-0"]
        metrics = decode._render_metrics().decode()
    links = {link["backend"]: link for link in told["links"]}
    assert told["circuit"] == "closed" and told["is_good"] and set(links) == {"nixl", "tcp"}
    assert links["nixl"]["mode"] == "read" and links["tcp"]["mode"] == "serve" and links["tcp"]["lane"] == "tcp"
    assert sum(link["is_used"] for link in links.values()) == 1
    assert all(link["bytes_per_s"] > 0 < link["memcpy_bytes_per_s"] and not link["slug"] for link in links.values())
    assert "prefill-0 > decode-0" in table and "nixl" in table and "used" in table
    assert 'baton_kv_pair_link_used{backend="nixl"' in metrics and "baton_kv_pair_bytes_total{" in metrics


async def test_a_pair_that_is_dead_or_was_restarted_is_said_to_be(engines: dict[str, Engine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    async with cluster_of(engines) as cluster:
        prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        async with DecodeClient(address(decode)) as client:
            gone = WorkerAddress(worker_id=WorkerId("prefill-9"), incarnation=Incarnation(9), address=free)
            with pytest.raises(PeerLost, match="prefill-9 is gone"):
                await client.check_pair(gone)
            with pytest.raises(PeerLost, match="another worker or incarnation"):
                await client.check_pair(address(prefill, 7))
        async with DecodeClient(address(decode, 8)) as client:
            with pytest.raises(StaleIncarnation, match="decode-0 was restarted"):
                await client.check_pair(address(prefill))
