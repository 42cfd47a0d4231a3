"""A cluster of real processes over mTLS: it serves, and nobody without the right certificate is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from baton.cli import main
from core import types as t
from core.clock import MonotonicClock
from core.credentials import Credentials
from core.errors import NotAllowed, TicketRefused, WorkerLost
from core.handoff import Hello, LinkInfo, PeerInfo, ToHolder
from core.ids import Incarnation, RequestId, WorkerId
from core.kv import KVFormat, KVGeometry
from core.security_config import Identity
from core.tickets import TicketOffice
from deploy.launcher import EXIT_CONFIG
from rpc.clients import DecodeClient, HandoffClient, PrefillClient, RouterClient
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import ask, questions, tiny_settings
from tests.support.tls import MadeCluster

FORMAT = KVFormat(
    model_digest="",
    tokenizer_digest="",
    template_digest="",
    compute_dtype="",
    kv_dtype="",
    quantisation="",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
GEOMETRY = KVGeometry(num_blocks=1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=1, dtype_bytes=4)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


async def test_a_secured_cluster_serves_and_lets_nobody_else_in(tmp_path: Path) -> None:
    made = MadeCluster(tmp_path / "tls")
    async with ProcessCluster(tmp_path, *tiny_settings(tmp_path), *made.overrides) as cluster:
        (question,) = questions(seed=1, count=1, longest=60, num_tokens=20)
        answer = await ask(cluster, question)
        assert len(answer["choices"][0]["token_ids"]) == question.num_tokens
        records: tuple[t.RequestRecord, ...] = ()
        async with asyncio.timeout(60):
            while not records:
                await asyncio.sleep(0.05)
                records = (await cluster.router.find_records()).records
        assert (records[0].mode, records[0].attempts) == ("split", 1), "handed off with a ticket"
        status = await cluster.router.status()
        workers = {one.registration.role: one.registration for one in status.workers}
        gateway = Credentials(made.files("gateway"), Identity.GATEWAY)
        worker = Credentials(made.files("worker"), Identity.WORKER)
        address = cluster.config.router.listen
        async with RouterClient(address) as plain:
            with pytest.raises(WorkerLost, match=r"security\.tls"):
                await plain.status()
        async with RouterClient(address, worker) as of_a_worker:
            with pytest.raises(NotAllowed, match=r"Status is for gateway\.baton or operator\.baton"):
                await of_a_worker.status()
        async with RouterClient(address, gateway) as of_a_gateway:
            with pytest.raises(NotAllowed, match=r"Drain is for operator\.baton"):
                await of_a_gateway.drain(workers[t.Role.DECODE].worker_id, "mischief")
        operator = Credentials(made.files("operator"), Identity.OPERATOR)
        async with DecodeClient(address_of(workers[t.Role.DECODE]), operator) as client:
            check = await client.check_pair(address_of(workers[t.Role.PREFILL]))
        assert {(link.backend, link.slug) for link in check.links} == {("nixl", ""), ("tcp", "")}, check
        settings = [f"--set={setting}" for setting in (*made.overrides, f"router.listen={address}")]
        assert await asyncio.to_thread(main, ["status", *settings]) == 0
        assert await asyncio.to_thread(main, ["status", settings[-1]]) == EXIT_CONFIG, "without certificates"
        await no_word_without_a_ticket(workers[t.Role.PREFILL], worker)
        abort = t.AbortRequest(request_id=RequestId("x"), attempt=0, reason="mischief")
        for role, make in ((t.Role.PREFILL, PrefillClient), (t.Role.DECODE, DecodeClient)):
            place = address_of(workers[role])
            async with make(place) as plain_client:
                with pytest.raises(WorkerLost):
                    await plain_client.abort(abort)
            async with make(place, worker) as other:
                with pytest.raises(NotAllowed, match=r"is for gateway\.baton"):
                    await other.abort(abort)


def address_of(worker: t.WorkerRegistration) -> t.WorkerAddress:
    return t.WorkerAddress(worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address)


async def no_word_without_a_ticket(holder: t.WorkerRegistration, credentials: Credentials) -> None:
    """A worker of the cluster that the router has not introduced: another process with a worker's certificate."""
    place = address_of(holder)
    me = t.WorkerAddress(worker_id=WorkerId("decode-0"), incarnation=Incarnation(77), address="")
    link = LinkInfo(backend="tcp", agent_name="", metadata=b"", regions=())
    peer = PeerInfo(worker_id=me.worker_id, incarnation=me.incarnation, format=FORMAT, geometry=GEOMETRY, link=link)
    forged = TicketOffice(MonotonicClock()).introduce(me, place)
    for ticket in (b"", forged):

        async def messages(ticket: bytes = ticket) -> AsyncIterator[ToHolder]:
            yield Hello(peer=peer, ticket=ticket)
            await asyncio.Event().wait()

        async with HandoffClient(place, credentials) as client, aclosing(client.connect(messages())) as replies:
            with pytest.raises(TicketRefused):
                await anext(replies)
