"""The real gateway process, over real gRPC and HTTP, before a scripted cluster: the official client, kills, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from core import types as t
from core.config import config_to_json, parse_config
from core.ids import GatewayId, Incarnation, WorkerId
from deploy.cluster import resolve_ports
from rpc.server import RpcServer
from tests.support.certificates import write_certificate
from tests.support.scripted import Script, ScriptedCluster, ScriptedDecode, ScriptedPrefill
from tests.support.tiny_model import write_folder
from tests.support.tiny_tokenizer import ids_of

pytestmark = pytest.mark.processes

ANSWER = "Paris \U0001f5fc"
READY_LINE = "baton-ready "


class Handlers:
    """The scripted cluster behind gRPC: router, prefill and decode in one server."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self.cluster = cluster
        self.address = ""
        self.gone = asyncio.Event()
        self._prefill = ScriptedPrefill(cluster, incarnation=Incarnation(9))
        self._decode: ScriptedDecode | None = None

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        placement = await self.cluster.place(request)
        decode = t.WorkerAddress(
            worker_id=placement.decode.worker_id, incarnation=placement.decode.incarnation, address=self.address
        )
        prefill = t.WorkerAddress(worker_id=WorkerId("prefill-0"), incarnation=Incarnation(9), address=self.address)
        return t.Placement(
            placement_id=placement.placement_id,
            handoff_id=placement.handoff_id,
            mode=placement.mode,
            decode=decode,
            prefill=prefill,
        )

    async def end_placement(self, end: t.PlacementEnd) -> None:
        await self.cluster.end_placement(end)

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        return await self.cluster.report_gateway(report)

    async def prefill(self, request: t.PrefillRequest) -> t.PrefillReply:
        return await self._prefill.prefill(request)

    async def abort_prefill(self, request: t.AbortRequest) -> t.AbortReply:
        return await self._prefill.abort(request)

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        assert self._decode is not None, "admitted before the token stream was open"
        return await self._decode.admit(request)

    async def abort_decode(self, request: t.AbortRequest) -> t.AbortReply:
        assert self._decode is not None
        return await self._decode.abort(request)

    async def outputs(
        self, gateway_id: GatewayId, gateway_incarnation: Incarnation, worker_incarnation: Incarnation
    ) -> AsyncIterator[t.StepOutputs]:
        worker = t.WorkerAddress(worker_id=WorkerId("decode-0"), incarnation=worker_incarnation, address="")
        self._decode = ScriptedDecode(self.cluster, worker)
        try:
            async for message in self._decode.outputs(gateway_id, gateway_incarnation):
                yield message
        finally:
            self.gone.set()


@dataclass
class Stage:
    cluster: ScriptedCluster
    handlers: Handlers
    url: str
    process: asyncio.subprocess.Process
    listen: str


async def start_gateway(model: Path, router: str, listen: str, **gateway: object) -> asyncio.subprocess.Process:
    config = parse_config(
        {
            "models": [{"name": "m", "path": str(model)}],
            "gateway": {"listen": listen, "limits": {"drain_s": 5}, **gateway},
            "router": {"listen": router},
        }
    )
    arguments = ("-m", "baton.process", "gateway", "--config-json", config_to_json(config))
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)


async def listening(process: asyncio.subprocess.Process) -> str:
    """Where a gateway serves, once it does."""
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert line.startswith(READY_LINE), line
    address: str = json.loads(line.removeprefix(READY_LINE))["http"]
    return address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_folder(folder)


@pytest.fixture
async def stage(model: Path) -> AsyncIterator[Stage]:
    cluster = ScriptedCluster(Script(steps=[[one] for one in ids_of(ANSWER)]))
    handlers = Handlers(cluster)
    server = RpcServer()
    server.add_router(handlers)  # type: ignore[arg-type]  # the calls a gateway makes, no others
    server.add_prefill(handlers)
    server.add_decode(handlers)
    handlers.address = await server.start("127.0.0.1:0")
    process = await start_gateway(model, handlers.address, "127.0.0.1:0")
    listen = await listening(process)
    yield Stage(cluster=cluster, handlers=handlers, url=f"http://{listen}", process=process, listen=listen)
    if process.returncode is None:
        process.kill()
    await process.communicate()
    await cluster.close()
    await server.stop(0)


async def test_the_official_client_works_unmodified(stage: Stage) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).object == "model"
        plain = await client.chat.completions.create(model="m", messages=messages, max_tokens=60)  # type: ignore[call-overload]
        assert plain.choices[0].message.content == ANSWER
        assert plain.usage.completion_tokens == len(ids_of(ANSWER))
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert chunks[-1].usage == plain.usage
        text = await client.completions.create(model="m", prompt="The capital", max_tokens=60)
        assert text.choices[0].text == ANSWER
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=messages)  # type: ignore[call-overload]
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=messages, temperature=9, stream=True)  # type: ignore[call-overload]
        assert bad.value.param == "temperature"
        assert bad.value.request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_socket_reaches_both_workers(stage: Stage, stream: bool) -> None:
    stage.cluster.hold("token-3")
    body = {"model": "m", "prompt": "x", "max_tokens": 60, "stream": stream}
    async with httpx.AsyncClient() as client:
        call = asyncio.ensure_future(client.post(f"{stage.url}/v1/completions", json=body))
        await asyncio.wait_for(stage.cluster.until("token-3"), 20)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(60):
        await asyncio.gather(stage.cluster.until("abort-decode"), stage.cluster.until("abort-prefill"))


async def test_a_killed_gateway_is_noticed_by_the_worker(stage: Stage) -> None:
    stage.cluster.hold("token-3")
    async with httpx.AsyncClient() as client:
        body = {"model": "m", "prompt": "x", "max_tokens": 60}
        call = asyncio.ensure_future(client.post(f"{stage.url}/v1/completions", json=body))
        await asyncio.wait_for(stage.cluster.until("token-3"), 20)
        stage.process.kill()
        await asyncio.wait_for(stage.handlers.gone.wait(), 2)
        await asyncio.gather(call, return_exceptions=True)


async def test_sigterm_finishes_what_runs_and_exits_cleanly(stage: Stage) -> None:
    stage.cluster.hold("token-3")
    async with httpx.AsyncClient() as client:
        body = {"model": "m", "prompt": "x", "max_tokens": 60}
        call = asyncio.ensure_future(client.post(f"{stage.url}/v1/completions", json=body))
        await asyncio.wait_for(stage.cluster.until("token-3"), 20)
        stage.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            ready = f"{stage.url}/ready"
            while (await client.get(ready)).json().get("error", {}).get("code") != "draining":
                await asyncio.sleep(0.01)  # another process: there is nothing to await
        stage.cluster.release("token-3")
        assert (await call).json()["choices"][0]["text"] == ANSWER
    assert await asyncio.wait_for(stage.process.wait(), 10) == 0


async def test_a_certificate_is_renewed_and_a_second_signal_ends_the_drain(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(cert, key, name="first")
    tls = {"cert": str(cert), "key": str(key), "reload_s": 0.05}
    settings = {"tls": tls, "limits": {"drain_wait_s": 600, "drain_s": 600}}
    process = await start_gateway(model, stage.handlers.address, "127.0.0.1:0", **settings)
    try:
        url = f"https://{await listening(process)}"
        old = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(verify=old) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            write_certificate(cert, key, name="second")
            new = ssl.create_default_context(cafile=str(cert))
            async with asyncio.timeout(60), httpx.AsyncClient(verify=new) as other:
                while True:
                    try:
                        assert (await other.get(f"{url}/health")).status_code == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.02)  # another process: there is nothing to await
            stage.cluster.hold("token-3")
            body = {"model": "m", "prompt": "x", "max_tokens": 60, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60), httpx.AsyncClient(verify=new) as other:
                    while (await other.get(f"{url}/ready")).json().get("error", {}).get("code") != "draining":
                        await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
        assert first.startswith("data: {")
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_taken_port_is_one_line(stage: Stage, model: Path) -> None:
    second = await start_gateway(model, stage.handlers.address, stage.listen)
    _, errors = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode not in (0, None)
    lines = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    [line] = lines
    assert stage.listen in line
    assert "gateway.listen" in line
    assert "Traceback" not in line


async def test_several_processes_share_one_port_and_answer_for_a_dead_one(model: Path) -> None:
    listen = resolve_ports(parse_config({"gateway": {"listen": "127.0.0.1:0"}})).gateway.listen
    processes = [await start_gateway(model, "127.0.0.1:1", listen, processes=2) for _ in range(2)]
    try:
        probes = []
        for process in processes:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            addresses = json.loads(line.removeprefix(READY_LINE))
            assert addresses["http"] == listen
            probes.append(addresses["probes"])
        await ask_health(listen, 40)
        counts = [await num_answers(probe) for probe in probes]
        assert sum(counts) == 40 and all(counts), "the kernel spreads connections"
        processes[0].kill()
        await processes[0].wait()
        await ask_health(listen, 20)
        assert await num_answers(probes[1]) == counts[1] + 20
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def ask_health(listen: str, times: int) -> None:
    """Over a connection of its own each time."""
    for _ in range(times):
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://{listen}/health")).status_code == 200


async def num_answers(probe: str) -> int:
    """To `/health`, as one process counts them on its own port."""
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://{probe}/ready")).status_code == 503  # there is no router
        text = (await client.get(f"http://{probe}/metrics")).text
    found = re.search(r'^baton_gateway_http_responses_total\{route="/health",status="200"\} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0
