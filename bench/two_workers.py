"""A cluster of two workers for measuring: this process is router and gateway, P and D are children.

Workers note the times of their steps and digests and what moves, on the machine's monotonic clock, which they share.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx

from core.config import ClusterConfig, load_config, set_worker_environment
from core.ids import GatewayId, WorkerId, new_incarnation
from core.telemetry import Telemetry
from core.types import Role
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.ports import RpcClients
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Batch, Link, Op, OpState, OpStatus
from kvtransfer.backends.paced import PacedBackend
from kvtransfer.memory import REGION_KV
from router.service import RouterServer
from rpc.clients import RouterClient

CHUNK_TOKENS = 512
START_S, LIMIT_S = 120.0, 300.0

Span = tuple[float, float]
"""Of the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What differs between runs."""

    backend: str = "nixl"
    early_reads: bool = True

    def overrides(self, router: str) -> list[str]:
        return [
            f"router.listen={router}",
            "router.mode=split",
            "gateway.listen=127.0.0.1:0",
            f"transfer.backend={self.backend}",
            f"transfer.early_reads={str(self.early_reads).lower()}",
            f"models.0.pools={{prefill: {{max_step_tokens: {CHUNK_TOKENS}}}, decode: {{}}}}",
            "models.0.kv.num_blocks=320",
            "worker.pin_threads=false",
        ]


@dataclass(slots=True, kw_only=True)
class Move:
    """One operation that brings KV."""

    posted_at: float
    num_bytes: int
    done_at: float = 0.0


class Watched(PacedBackend):
    """A backend that notes what moves, and can be slowed to ``bytes_per_s`` as a link would be."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, self._cost_s_of)
        self.moves: list[Move] = []
        self.bytes_per_s = 0.0
        self._pending: dict[Op, Move] = {}

    def _cost_s_of(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def post(self, link: Link, batch: Batch) -> Op:
        move = Move(posted_at=time.monotonic(), num_bytes=batch.num_bytes)
        op = super().post(link, batch)
        if batch.local_region == REGION_KV:
            self.moves.append(move)
            self._pending[op] = move
        return op

    def poll(self, op: Op) -> OpStatus:
        status = super().poll(op)
        if status.state is not OpState.PENDING and (move := self._pending.pop(op, None)) is not None:
            move.done_at = time.monotonic()
        return status


@dataclass(slots=True, kw_only=True)
class Notes:
    """What a worker did."""

    steps: list[Span] = field(default_factory=list)
    digests: list[Span] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


# -- the workers ------------------------------------------------------------------------------------------------------


async def _start_worker(
    config: ClusterConfig, role: Role, backend: Backend, notes: Notes, stack: AsyncExitStack
) -> str:
    """Returns the data type of its KV."""
    from decode_worker.service import DecodeRole
    from engine.engine import StepResult
    from engine.kernels.digest import compiled_wsum64
    from kvtransfer.digest import Digester
    from prefill_worker.service import PrefillRole
    from worker.context import WorkerContext, WorkerRole
    from worker.process import SWITCH_S, TransferMemory, Worker, load_engine

    class NotingDigester(Digester):
        def digest(self, blocks: Sequence[int]) -> bytes:
            began = time.monotonic()
            made = super().digest(blocks)
            notes.digests.append((began, time.monotonic()))
            return made

    class NotingPrefill(PrefillRole):
        def on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
            notes.steps.append((started_at, ended_at))
            super().on_step(result, started_at, ended_at)

    class NotingDecode(DecodeRole):
        def on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
            notes.steps.append((started_at, ended_at))
            super().on_step(result, started_at, ended_at)

    def make_role(context: WorkerContext, memory: TransferMemory) -> WorkerRole:
        region = context.engine.kv_region
        context.digester = NotingDigester.at_address(
            config.transfer.digest, context.geometry, region.address, sums=compiled_wsum64()
        )
        if role is Role.PREFILL:
            return NotingPrefill(context, memory.leases, memory.me)
        return NotingDecode(context, memory.transfers, memory.me)

    sys.setswitchinterval(SWITCH_S)  # as :func:`worker.process.run_worker`
    model = config.models[0]
    worker = Worker(
        config,
        model=model.name,
        role=role,
        worker_id=WorkerId(f"{role}-0"),
        engine=load_engine(config, model, role),
        backend=backend,
        make_role=make_role,
    )
    await worker.start()
    stack.push_async_callback(worker.stop)
    return worker.context.format.kv_dtype


async def hold(role: Role, overrides: Sequence[str]) -> None:
    """A child: one worker. Each line on standard input sets its link's rate, and is answered with what the worker did
    since the last; ends with the input."""
    config = load_config(overrides=overrides, environ={})
    notes, backend = Notes(), Watched(create_backend(config.transfer.backend))
    async with AsyncExitStack() as stack:
        kv_dtype = await _start_worker(config, role, backend, notes, stack)
        print(kv_dtype, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            backend.bytes_per_s = float(line)
            moves = [(move.posted_at, move.done_at, move.num_bytes) for move in backend.moves]
            print(json.dumps({"steps": notes.steps, "digests": notes.digests, "moves": moves}), flush=True)
            notes.steps, notes.digests, backend.moves = [], [], []


class Child:
    """A worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, role: Role, overrides: Sequence[str], stack: AsyncExitStack) -> "Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.two_workers", "--role", role, "--hold", *overrides,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip
        stack.push_async_callback(process.wait)
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        return cls(process)

    async def line(self) -> str:
        """The next that it says. Raises SystemExit when it has ended."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await self._process.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit("a worker did not start, or has ended")
        return line

    async def ask(self, bytes_per_s: float) -> Notes:
        """What it did since it was last asked. Its link has that rate from now on; 0 is its own."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bytes_per_s}\n".encode())
        answer = json.loads(await self.line())
        return Notes(
            steps=[(begin, end) for begin, end in answer["steps"]],
            digests=[(begin, end) for begin, end in answer["digests"]],
            moves=[Move(posted_at=posted, done_at=done, num_bytes=size) for posted, done, size in answer["moves"]],
        )


class Cluster:
    """Router and gateway in this process, P and D in children."""

    def __init__(self, prefill: Child, decode: Child, kv_dtype: str, model: str, http: httpx.AsyncClient) -> None:
        self.kv_dtype = kv_dtype
        self.bytes_per_s = 0.0
        """Of D's link; 0: as fast as it is."""
        self._prefill, self._decode = prefill, decode
        self._model = model
        self._http = http

    @classmethod
    @asynccontextmanager
    async def start(cls, setup: Setup) -> "AsyncIterator[Cluster]":
        async with AsyncExitStack() as stack:
            router = RouterServer(load_config(overrides=setup.overrides("127.0.0.1:0"), environ={}))
            await router.start()
            stack.push_async_callback(router.stop)
            overrides = setup.overrides(router.address)
            config = load_config(overrides=overrides, environ={})
            children = [await Child.start(role, overrides, stack) for role in (Role.PREFILL, Role.DECODE)]
            kv_dtype, _ = [await child.line() for child in children]
            gateway = Gateway(
                config,
                router=RouterClient(router.address),
                clients=RpcClients(),
                models=[ServedModel.load(model) for model in config.models],
                telemetry=Telemetry(component="gateway"),
                gateway_id=GatewayId("gateway-0"),
                incarnation=new_incarnation(),
            )
            gateway.start()
            stack.push_async_callback(gateway.close)
            http = httpx.AsyncClient(
                transport=httpx.ASGITransport(gateway.asgi), base_url="http://gateway", timeout=LIMIT_S
            )
            stack.push_async_callback(http.aclose)
            async with asyncio.timeout(START_S):
                while (await http.get("/ready")).is_error:
                    await asyncio.sleep(0.05)
            prefill, decode = children
            yield cls(prefill, decode, kv_dtype, config.models[0].name, http)

    async def complete(self, prompt: list[int]) -> tuple[Notes, Notes]:
        """Two tokens to a prompt: what P noted meanwhile, and D."""
        for child in (self._prefill, self._decode):
            await child.ask(self.bytes_per_s)
        body = {"model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        await asyncio.sleep(0.1)  # what both note after the last token
        return await self._prefill.ask(self.bytes_per_s), await self._decode.ask(self.bytes_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.two_workers", description=__doc__)
    parser.add_argument("--role", type=Role, required=True)
    parser.add_argument("--hold", nargs="+", required=True)
    options = parser.parse_args()
    set_worker_environment(1)
    asyncio.run(hold(options.role, options.hold))


if __name__ == "__main__":
    main()
