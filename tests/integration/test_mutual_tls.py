"""gRPC between processes over mTLS: who has no certificate for what it asks is not served, and both sides say why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import uvloop

from core import types as t
from core.credentials import Credentials, Material
from core.errors import NotAllowed, WorkerLost
from core.ids import GatewayId, Incarnation, WorkerId
from core.made_certificates import issue, make_authority
from core.security_config import Identity
from rpc.clients import DecodeClient, RouterClient
from rpc.identities import CALLERS
from rpc.pb import decode_pb2, handoff_pb2, prefill_pb2, router_pb2
from rpc.server import RpcServer
from tests.support.tls import DOMAIN, MadeCluster


class Decoder:
    """Streams one empty message, and knows whether anybody came through."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def abort_decode(self, request: t.AbortRequest) -> t.AbortReply:
        self.num_calls += 1
        return t.AbortReply(found=True)

    async def outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, worker_incarnation: Incarnation
    ) -> AsyncIterator[t.StepOutputs]:
        self.num_calls += 1
        yield t.StepOutputs()


ABORT = t.AbortRequest(request_id="r", attempt=1, reason="x")  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path) -> MadeCluster:
    return MadeCluster(tmp_path)


@asynccontextmanager
async def serving(credentials: Credentials | None) -> AsyncIterator[tuple[Decoder, str]]:
    decoder, server = Decoder(), RpcServer(credentials)
    server.add_decode(decoder)  # type: ignore[arg-type]
    await server.start("127.0.0.1:0")
    try:
        yield decoder, server.address
    finally:
        await server.stop(0)


def client(address: str, credentials: Credentials | None) -> DecodeClient:
    worker = t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address=address)
    return DecodeClient(worker, credentials)


def credentials(made: MadeCluster, identity: Identity) -> Credentials:
    return Credentials(made.files(identity), identity)


async def calls_and_streams(address: str, own: Credentials) -> None:
    async with client(address, own) as decode:
        assert (await decode.abort(ABORT)).found
        async with aclosing(decode.outputs(GatewayId("g"), Incarnation(1))) as outputs:  # type: ignore[type-var]
            assert await anext(outputs) == t.StepOutputs()


async def test_calls_and_streams_pass_between_those_that_the_ca_has_signed(made: MadeCluster) -> None:
    async with serving(credentials(made, Identity.WORKER)) as (decoder, address):
        await calls_and_streams(address, credentials(made, Identity.GATEWAY))
        assert decoder.num_calls == 2


def test_a_gateways_own_loop_speaks_tls_too(made: MadeCluster) -> None:
    async def both() -> None:
        async with serving(credentials(made, Identity.WORKER)) as (_, address):
            await calls_and_streams(address, credentials(made, Identity.GATEWAY))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(both())


async def test_who_shows_no_certificate_is_not_served(made: MadeCluster) -> None:
    async with serving(credentials(made, Identity.WORKER)) as (decoder, address):
        async with client(address, None) as plain:
            with pytest.raises(WorkerLost, match=r"security\.tls"):
                await plain.abort(ABORT)
        # grpc's own client, which trusts the server and has nothing to show
        trusting = grpc.ssl_channel_credentials((made.folder / "ca.pem").read_bytes())
        options = (("grpc.ssl_target_name_override", f"worker.{DOMAIN}"),)
        async with grpc.aio.secure_channel(address, trusting, options=options) as channel:
            call = channel.unary_unary("/baton.v1.Decode/AbortDecode")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert decoder.num_calls == 0


async def test_certificates_of_another_ca_are_not_taken_on_either_side(made: MadeCluster, tmp_path: Path) -> None:
    other = MadeCluster(tmp_path / "other")
    stranger = credentials(other, Identity.GATEWAY)
    async with serving(credentials(made, Identity.WORKER)) as (decoder, address):
        async with client(address, stranger) as strange:
            with pytest.raises(WorkerLost, match=rf"not good for worker\.{DOMAIN}.*valid from"):
                await strange.abort(ABORT)
        # one that believes the server, but whom the server does not believe
        other.trust(made.authority, other.authority)
        async with client(address, credentials(other, Identity.GATEWAY)) as believing:
            with pytest.raises(WorkerLost, match="its log says whether it takes"):
                await believing.abort(ABORT)
        assert decoder.num_calls == 0


async def test_an_expired_certificate_is_not_taken_and_its_end_is_told(made: MadeCluster) -> None:
    name = f"worker.{DOMAIN}"
    worker, gateway = credentials(made, Identity.WORKER), credentials(made, Identity.GATEWAY)
    async with serving(worker) as (decoder, address), client(address, gateway) as decode:
        expired = made.expired(name)
        # As of a process that runs on after its certificate's end.
        worker._material = _with(worker, expired.pem, expired.key_pem)
        with pytest.raises(WorkerLost, match=rf"certificate has expired; it names {name}, and is valid .* to "):
            await decode.abort(ABORT)
        assert decoder.num_calls == 0


async def test_a_server_is_asked_for_its_own_name(made: MadeCluster) -> None:
    async with serving(credentials(made, Identity.GATEWAY)) as (decoder, address):
        async with client(address, credentials(made, Identity.GATEWAY)) as decode:
            with pytest.raises(WorkerLost, match=rf"not good for worker\.{DOMAIN}.*it names gateway\.{DOMAIN}"):
                await decode.abort(ABORT)
        assert decoder.num_calls == 0


@pytest.mark.parametrize("identity", [one for one in Identity if one is not Identity.GATEWAY])
async def test_a_good_certificate_opens_only_what_it_is_for(made: MadeCluster, identity: Identity) -> None:
    async with serving(credentials(made, Identity.WORKER)) as (decoder, address):
        async with client(address, credentials(made, identity)) as decode:
            told = rf"AbortDecode is for gateway\.{DOMAIN}; the caller's certificate names {identity}\.{DOMAIN}"
            with pytest.raises(NotAllowed, match=told):
                await decode.abort(ABORT)
            with pytest.raises(NotAllowed, match=r"Outputs is for gateway"):
                await anext(aiter(decode.outputs(GatewayId("g"), Incarnation(1))))
        assert decoder.num_calls == 0


async def test_a_common_name_proves_nothing(made: MadeCluster) -> None:
    """Only names that the CA has vouched for as such count."""
    gateway = credentials(made, Identity.GATEWAY)
    other = issue(made.authority, ["nobody.baton", f"gateway.{DOMAIN}.evil"])
    gateway._material = _with(gateway, other.pem, other.key_pem)
    async with serving(credentials(made, Identity.WORKER)) as (_, address), client(address, gateway) as decode:
        with pytest.raises(NotAllowed, match="names nobody"):
            await decode.abort(ABORT)


async def test_there_is_no_falling_back_to_plain_text(made: MadeCluster) -> None:
    async with serving(None) as (decoder, address), client(address, credentials(made, Identity.GATEWAY)) as decode:
        with pytest.raises(WorkerLost, match="does not speak TLS"):
            await decode.abort(ABORT)
        assert decoder.num_calls == 0


async def test_a_peer_that_never_shakes_hands_is_given_up(made: MadeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.channel.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with client(address, credentials(made, Identity.GATEWAY)) as decode:
            with pytest.raises(WorkerLost, match="did not answer in time"):
                await decode.abort(ABORT)


async def test_a_renewed_certificate_and_a_new_ca_count_from_the_next_connection(made: MadeCluster) -> None:
    """The way from one CA to another: both are known, then both sides are signed by the new one, then the old goes."""
    worker, gateway = credentials(made, Identity.WORKER), credentials(made, Identity.GATEWAY)
    async with serving(worker) as (_, address), client(address, gateway) as standing:
        await standing.abort(ABORT)
        old, new = made.authority, make_authority()
        made.trust(old, new)
        for identity in Identity:
            await calls_and_streams(address, gateway)
            made.write(identity, issue(new, [f"{identity}.{DOMAIN}"]))
        await calls_and_streams(address, gateway)
        made.trust(new)
        await calls_and_streams(address, gateway)
        latecomer = MadeCluster(made.folder / "old")
        latecomer.write(Identity.GATEWAY, issue(old, [f"gateway.{DOMAIN}"]))
        latecomer.trust(old, new)
        async with client(address, credentials(latecomer, Identity.GATEWAY)) as late:
            with pytest.raises(WorkerLost):
                await late.abort(ABORT)
        assert (await standing.abort(ABORT)).found, "a connection that stands is not cut"


async def test_a_renewal_that_is_no_good_changes_nothing(made: MadeCluster) -> None:
    worker, gateway = credentials(made, Identity.WORKER), credentials(made, Identity.GATEWAY)
    async with serving(worker) as (_, address):
        for spoil in (
            lambda: made.write(Identity.WORKER, made.expired(f"worker.{DOMAIN}")),
            lambda: made.write(Identity.WORKER, issue(make_authority(), [f"worker.{DOMAIN}"])),
            lambda: made.write(Identity.WORKER, issue(made.authority, [f"router.{DOMAIN}"])),
            lambda: (made.folder / "worker.key").write_bytes(b"half of a k"),
            lambda: (made.folder / "ca.pem").unlink(),
        ):
            spoil()
            await calls_and_streams(address, gateway)


def test_every_method_names_its_callers() -> None:
    """Also one that is added: whoever does so says who may call it."""
    files = (router_pb2, prefill_pb2, decode_pb2, handoff_pb2)
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == {method for method in CALLERS if method.startswith("/baton.")}


async def test_a_router_client_asks_for_the_router(made: MadeCluster) -> None:
    operator = credentials(made, Identity.OPERATOR)
    async with serving(credentials(made, Identity.WORKER)) as (_, address), RouterClient(address, operator) as router:
        with pytest.raises(WorkerLost, match=rf"not good for router\.{DOMAIN}"):
            await router.status()


def _with(own: Credentials, cert: bytes, key: bytes) -> Material:
    """What a process holds whose files were no good any more when it was asked."""
    folder = Path(own.files.cert).parent / "held"
    folder.mkdir()
    (folder / "c.pem").write_bytes(cert)
    (folder / "c.key").write_bytes(key)
    material = own.current()
    material.client.load_cert_chain(folder / "c.pem", folder / "c.key")
    return replace(material, cert=cert, key=key)
