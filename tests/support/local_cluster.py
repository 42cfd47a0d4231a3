"""A whole cluster inside the test's process: real router, gateway, engines and gRPC, with transfer backends of the
test's choice.

For what real processes cannot do: flip a byte in flight, look into a pool, stop a step.
"""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from types import TracebackType
from typing import Any, Self

import httpx

from baton.roles import make_role
from core.config import ClusterConfig, ModelConfigSection, load_config
from core.credentials import open_credentials
from core.ids import GatewayId, WorkerId, new_incarnation
from core.security_config import Identity
from core.telemetry import Telemetry
from core.types import Role
from engine.engine import Engine
from gateway.access.assembly import open_access
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.ports import RpcClients
from kvtransfer.backends.base import Backend
from router.service import RouterServer
from rpc.clients import RouterClient
from worker.process import Worker, load_engine

MODEL = "smollm2-135m-instruct"
SETTINGS = (
    "router.listen=127.0.0.1:0",
    "router.heartbeat_s=0.05",
    "router.mode=split",
    "router.max_wait_s=300",  # a slow machine refuses nobody: who has to wait, waits
    "models.0.kv.num_blocks=160",
    "models.0.kv.prefault=false",
    "worker.pin_threads=false",
)


@cache
def _served_model(section: str) -> ServedModel:
    """Reading a tokenizer takes longer than most tests."""
    return ServedModel.load(ModelConfigSection.model_validate_json(section))


class LocalCluster:
    """``async with LocalCluster(make_backend) as cluster``. ``make_backend(worker_id)`` is called once for each worker.

    ``engines`` (by worker id) may be given to share loaded weights between clusters; a worker must be idle to be
    reused.
    """

    def __init__(
        self,
        make_backend: Callable[[str], Backend],
        *overrides: str,
        engines: Mapping[str, Engine] | None = None,
        make_fallback: Callable[[str], Backend | None] = lambda worker_id: None,
        telemetries: Mapping[str, Telemetry] | None = None,
    ) -> None:
        self.config: ClusterConfig = load_config(overrides=[*SETTINGS, *overrides], environ={})
        self._make_backend = make_backend
        self._make_fallback = make_fallback
        self._telemetries = dict(telemetries or {})
        self._engines = dict(engines or {})
        self._stack = AsyncExitStack()
        self.workers: dict[str, Worker] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        router = RouterServer(self.config, self._telemetries.get("router"))
        await router.start()
        self._stack.push_async_callback(router.stop)
        address = router.address
        section = self.config.router.model_copy(update={"listen": address})
        self.config = self.config.model_copy(update={"router": section})
        credentials = open_credentials(self.config.security, Identity.GATEWAY)
        self.router = RouterClient(address, credentials)
        for role in self.config.models[0].pools:
            await self._start_worker(role, f"{role}-0")
        incarnation = new_incarnation()
        access = await open_access(self.config.gateway.access, incarnation=incarnation)
        self.gateway = Gateway(
            self.config,
            router=self.router,
            clients=RpcClients(credentials),
            models=[_served_model(model.model_dump_json()) for model in self.config.models],
            telemetry=self._telemetries.get("gateway") or Telemetry(component="gateway"),
            gateway_id=GatewayId("gateway-0"),
            incarnation=incarnation,
            access=access,
        )
        self.gateway.start()
        self._stack.push_async_callback(self.gateway.close)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.gateway.asgi), base_url="http://gateway", timeout=120
        )
        self._stack.push_async_callback(self.http.aclose)

    async def _start_worker(self, role: Role, worker_id: str) -> None:
        engine = self._engines.get(worker_id)
        if engine is None:
            engine = load_engine(self.config, self.config.models[0], role)
            self._stack.callback(engine.close)
        worker = Worker(
            self.config,
            model=MODEL,
            role=role,
            worker_id=WorkerId(worker_id),
            engine=engine,
            backend=self._make_backend(worker_id),
            fallback=self._make_fallback(worker_id),
            make_role=make_role,
            telemetry=self._telemetries.get(worker_id),
        )
        self.workers[worker_id] = worker
        await worker.start()
        self._stack.push_async_callback(worker.stop)

    async def complete(
        self, prompt: str | list[int], *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """A plain completion, greedy unless told otherwise."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        answer = await self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result
