"""The router behind real gRPC: workers that join, die and come back; its own restart; its process."""

import asyncio
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest

from core.config import ClusterConfig, config_to_json, parse_config
from core.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    ServingError,
    StaleIncarnation,
    TooManyWaiting,
)
from core.types import (
    CommandKind,
    Placement,
    PoolSize,
    Role,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from router.service import RouterServer
from rpc.clients import RouterClient
from tests.unit.router.builders import MODEL, make_load, make_registration, make_report, make_request

PATIENCE_S = 20.0
"""An upper bound for what takes milliseconds; a test that reaches it fails."""


def make_config(listen: str = "127.0.0.1:0", **router: object) -> ClusterConfig:
    section = {"listen": listen, "heartbeat_s": 0.05, "heartbeat_timeout_s": 0.6, **router}
    return parse_config({"models": [{"name": MODEL, "path": "x"}], "router": section})


class Worker:
    """The worker's end of one membership stream over a real channel, with heartbeats."""

    def __init__(self, address: str, registration: WorkerRegistration, *, beat_s: float = 0.05) -> None:
        self._client = RouterClient(address)
        self._registration = registration
        self._beat_s = beat_s
        self.state = WorkerState.READY
        self.num_running = 0
        self.commands: asyncio.Queue[WorkerCommand] = asyncio.Queue()
        self.error: ServingError | None = None
        self.num_joins = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Once, or again when a heartbeat crossed the refusal on the wire and hid it: it comes anew."""
        while self.error is None or ("internal" in self.error.message and self.num_joins < 10):
            self.num_joins += 1
            try:
                async for command in self._client.join(self._messages()):
                    self.commands.put_nowait(command)
            except ServingError as error:
                self.error = error

    async def _messages(self) -> AsyncIterator[WorkerRegistration | WorkerLoad]:
        yield self._registration
        while True:
            yield make_load(self.state, num_running=self.num_running)
            await asyncio.sleep(self._beat_s)  # a heartbeat is a rate, not a synchronisation

    async def die(self) -> None:
        """As by kill -9: the connection breaks, nothing is said."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._client.close()


class Scene:
    def __init__(self) -> None:
        self.servers: list[RouterServer] = []
        self.workers: list[Worker] = []
        self.clients: list[RouterClient] = []

    async def serve(self, config: ClusterConfig) -> RouterServer:
        server = RouterServer(config)
        await server.start()
        self.servers.append(server)
        return server

    def client(self, server: RouterServer) -> RouterClient:
        client = RouterClient(server.address)
        self.clients.append(client)
        return client

    def join(self, server: RouterServer, name: str, role: Role, incarnation: int = 1) -> Worker:
        worker = Worker(server.address, make_registration(name, incarnation, role))
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self.workers:
            await worker.die()
        for client in self.clients:
            await client.close()
        for server in self.servers:
            await server.stop(grace_s=0.1)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.close()


def names(placement: Placement) -> tuple[str, int, str, int]:
    assert placement.prefill is not None
    prefill, decode = placement.prefill, placement.decode
    return prefill.worker_id, prefill.incarnation, decode.worker_id, decode.incarnation


async def test_a_request_waits_for_workers_and_for_the_next_incarnation_of_a_dead_one(scene: Scene) -> None:
    server = await scene.serve(make_config())
    router = scene.client(server)
    early = asyncio.create_task(router.place(make_request(deadline_s=PATIENCE_S)))
    scene.join(server, "p0", Role.PREFILL)
    first = scene.join(server, "d0", Role.DECODE)
    placement = await early
    assert names(placement) == ("p0", 1, "d0", 1)

    await first.die()
    retry = asyncio.create_task(router.place(make_request(deadline_s=PATIENCE_S, excluded_workers=(("d0", 1),))))
    scene.join(server, "d0", Role.DECODE, incarnation=2)
    assert names(await retry) == ("p0", 1, "d0", 2)
    status = await router.status()
    assert [(w.registration.worker_id, w.registration.incarnation) for w in status.workers] == [("d0", 2), ("p0", 1)]


async def test_with_nobody_back_in_time_the_error_is_typed_and_names_the_role(scene: Scene) -> None:
    server = await scene.serve(make_config(placement_wait_s=0.3))
    router = scene.client(server)
    scene.join(server, "p0", Role.PREFILL)
    with pytest.raises(NoWorker, match=r"model 'tiny' has no ready decode worker"):
        await router.place(make_request(deadline_s=PATIENCE_S))
    with pytest.raises(ModelNotFound):
        await router.place(make_request(model="unknown"))


async def test_without_room_a_request_waits_and_a_refusal_says_why_over_the_wire(scene: Scene) -> None:
    server = await scene.serve(make_config(max_waiting=1, max_wait_s=PATIENCE_S))
    router = scene.client(server)
    scene.join(server, "p0", Role.PREFILL)
    decode = scene.join(server, "d0", Role.DECODE)
    await router.place(make_request("first", deadline_s=PATIENCE_S))
    decode.num_running = 12  # of 8 at once, and half as many more
    async with asyncio.timeout(PATIENCE_S):
        while (await router.status()).workers[0].load.num_running != 12:
            await asyncio.sleep(0.01)
    waits = asyncio.create_task(router.place(make_request("second", deadline_s=PATIENCE_S)))
    async with asyncio.timeout(PATIENCE_S):
        while (await router.status()).num_waiting != 1:
            await asyncio.sleep(0.01)
    with pytest.raises(TooManyWaiting, match=r"d0 has 1\d requests \(8 run at once\), and 1 requests wait") as refusal:
        await router.place(make_request("third", deadline_s=PATIENCE_S))
    assert refusal.value.http_status == 429
    decode.num_running = 0
    assert (await waits).queue_s > 0.0


async def test_the_refusal_beats_the_requests_deadline_over_the_wire(scene: Scene) -> None:
    router = scene.client(await scene.serve(make_config()))
    await router.status()  # connected: what is timed is the refusal
    with pytest.raises(NoWorker):
        await router.place(make_request(deadline_s=1.0))


async def test_the_older_incarnation_is_refused_on_its_stream_and_at_its_return(scene: Scene) -> None:
    server = await scene.serve(make_config())
    router = scene.client(server)
    scene.join(server, "p0", Role.PREFILL)
    old = scene.join(server, "d0", Role.DECODE, incarnation=1)
    await router.place(make_request(deadline_s=PATIENCE_S))
    scene.join(server, "d0", Role.DECODE, incarnation=2)
    await old.task
    assert isinstance(old.error, StaleIncarnation)
    returned = scene.join(server, "d0", Role.DECODE, incarnation=1)
    await returned.task
    assert isinstance(returned.error, StaleIncarnation)
    assert names(await router.place(make_request(deadline_s=PATIENCE_S)))[3] == 2


async def test_a_restarted_router_is_whole_again_from_rejoins(scene: Scene) -> None:
    first = await scene.serve(make_config())
    worker = scene.join(first, "p0", Role.PREFILL)
    scene.join(first, "d0", Role.DECODE)
    await scene.client(first).place(make_request(deadline_s=PATIENCE_S))
    await first.stop(grace_s=0.1)
    await worker.task
    assert worker.error is not None  # the worker noticed at once, and joins again by its own loop
    second = await scene.serve(make_config(listen=first.address))
    router = scene.client(second)
    waiting = asyncio.create_task(router.place(make_request(deadline_s=PATIENCE_S)))
    scene.join(second, "p0", Role.PREFILL)
    scene.join(second, "d0", Role.DECODE)
    assert names(await waiting) == ("p0", 1, "d0", 1)
    assert (await router.status()).num_placements == 1


async def test_operators_drain_scale_and_watch(scene: Scene) -> None:
    server = await scene.serve(make_config())
    router = scene.client(server)
    scene.join(server, "p0", Role.PREFILL)
    decode = scene.join(server, "d0", Role.DECODE)
    await router.place(make_request(deadline_s=PATIENCE_S))
    assert (await decode.commands.get()).kind is CommandKind.JOINED
    await router.drain("d0", "maintenance")
    while (command := await decode.commands.get()).kind is CommandKind.PEERS:
        pass
    assert command == WorkerCommand(kind=CommandKind.DRAIN, reason="maintenance")
    view = await router.report_gateway(make_report())
    assert [(name, is_usable) for name, is_usable, _ in view.usable] == [(MODEL, False)]
    assert "no ready decode worker (1 draining)" in view.usable[0][2]
    with pytest.raises(InvalidRequest):
        await router.drain("nobody", "")
    watch = router.watch_pools()
    assert {p.role: p.replicas for p in await anext(watch)} == {Role.PREFILL: 1, Role.DECODE: 1}
    await router.scale((PoolSize(model=MODEL, role=Role.DECODE, replicas=2),))
    assert {p.role: p.replicas for p in await anext(watch)} == {Role.PREFILL: 1, Role.DECODE: 2}
    await watch.aclose()  # type: ignore[attr-defined]
    status = await router.status()
    assert status.router_http_address == server.http_address
    assert [g.gateway_id for g in status.gateways] == ["g0"]


async def test_a_taken_port_is_one_clear_error_and_leaves_nothing_running(scene: Scene) -> None:
    server = await scene.serve(make_config())
    num_tasks = len(asyncio.all_tasks())
    with pytest.raises(ConfigError, match=f"cannot listen on {server.address}"):
        await RouterServer(make_config(listen=server.address)).start()
    with pytest.raises(ConfigError, match="cannot listen on"):
        await RouterServer(make_config(http_listen=server.http_address)).start()
    assert len(asyncio.all_tasks()) == num_tasks


def fetch(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_the_process_serves_probes_and_stops_by_sigterm_within_two_seconds(scene: Scene) -> None:
    argv = (sys.executable, "-m", "baton.process", "router", "--config-json", config_to_json(make_config()))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        addresses = json.loads(line.removeprefix("baton-ready "))
        client = RouterClient(addresses["grpc"])
        scene.clients.append(client)
        assert (await client.status()).router_pid == process.pid
        worker = Worker(addresses["grpc"], make_registration("d0", 1, Role.DECODE))  # its stream is open at the stop
        scene.workers.append(worker)
        assert (await asyncio.to_thread(fetch, addresses["http"], "/ready"))[0] == 200
        status, text = await asyncio.to_thread(fetch, addresses["http"], "/metrics")
        assert status == 200 and "baton_router_workers" in text
        since = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert time.monotonic() - since < 2.0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
