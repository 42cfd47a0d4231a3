"""A worker's process: one engine, and on it one worker after the other.

The first life has the role that the process was started for. A flip ends a life by a drain and begins the next one in
the other role: the weights stay where they are, all else (block pool, prefix cache, registered memory, incarnation) is
made anew. A life that leaves anything behind is the last: the process ends and is restarted.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry

from core.config import ClusterConfig, ModelConfigSection
from core.credentials import open_credentials
from core.errors import WorkerLost
from core.ids import WorkerId
from core.security_config import Identity
from core.telemetry import Telemetry, setup_telemetry
from core.types import Role
from engine.engine import Engine
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend
from worker.process import SWITCH_S, MakeRole, Worker, engine_config, load_engine

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lives:
    """The lives of one worker process, and the signals that end them: the first one drains, the next one hurries."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ModelConfigSection,
        *,
        worker_id: str,
        engine: Engine,
        make_role: MakeRole,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._model = model
        self._worker_id = worker_id
        self._engine = engine
        self._make_role = make_role
        self._telemetry = telemetry
        self._worker: Worker | None = None
        self._signal = ""

    async def run(self, role: Role, announce: Callable[[Mapping[str, str]], None]) -> None:
        """Until one leaves in good order. Raises ConfigError, or WorkerLost when one broke."""
        next_role: Role | None = role
        http_port = 0
        while next_role is not None:
            worker = self._begin(next_role, http_port)
            await worker.start()
            announce({"grpc": worker.address, "http": worker.http_address})
            if self._signal:
                worker.drain(self._signal)
            exit_code = await worker.run_until_stopped()
            is_clean = await worker.stop()
            http_port = int(worker.http_address.rpartition(":")[2])
            next_role = worker.next_role
            if exit_code:
                raise WorkerLost(f"{self._worker_id} broke and must be restarted")
            if next_role is not None:
                self._renew(next_role, is_clean=is_clean)

    def _begin(self, role: Role, http_port: int) -> Worker:
        host = self._config.worker.host
        credentials = open_credentials(self._config.security, Identity.WORKER)
        self._worker = Worker(
            self._config,
            model=self._model.name,
            role=role,
            worker_id=WorkerId(self._worker_id),
            engine=self._engine,
            backend=create_backend(self._config.transfer.backend, host=host, credentials=credentials),
            fallback=_fallback(self._config, self._engine),
            make_role=self._make_role,
            telemetry=replace(self._telemetry, registry=CollectorRegistry()),
            http_port=http_port,
        )
        return self._worker

    def _renew(self, role: Role, *, is_clean: bool) -> None:
        """The engine as it was after loading. Raises WorkerLost where memory may still be written to."""
        counts = self._engine.pool.counts()
        if not is_clean or not counts.is_idle():
            raise WorkerLost(
                f"{self._worker_id} cannot become a {role} worker in place: transfers or {counts} are left of its time "
                "before; it is restarted"
            )
        self._engine.renew(engine_config(self._model, role))
        log.info("flipped", extra={"worker_id": self._worker_id, "role": role})

    def on_signal(self, name: str) -> None:
        worker, is_first = self._worker, not self._signal
        self._signal = f"signal {name}"
        if worker is None:
            return
        if is_first:
            worker.drain(self._signal)
        else:
            worker.hurry()


async def run_worker(
    config: ClusterConfig,
    model: ModelConfigSection,
    role: Role,
    *,
    worker_id: str,
    announce: Callable[[Mapping[str, str]], None],
    make_role: MakeRole,
) -> None:
    """Load, serve, and return after an orderly end. Raises ConfigError, or WorkerLost when the worker broke."""
    sys.setswitchinterval(SWITCH_S)
    telemetry = setup_telemetry(worker_id, config.telemetry)
    engine = await asyncio.to_thread(load_engine, config, model, role)
    try:
        lives = Lives(config, model, worker_id=worker_id, engine=engine, make_role=make_role, telemetry=telemetry)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, lives.on_signal, number.name)
        await lives.run(role, announce)
    finally:
        engine.close()


def _fallback(config: ClusterConfig, engine: Engine) -> Backend | None:
    """The second backend, where there is one that can be used."""
    name, transfer = config.transfer.fallback, config.transfer
    if name in ("none", transfer.backend) or engine.kv_region.device != "cpu":
        return None
    return create_backend(name, host=config.worker.host, credentials=open_credentials(config.security, Identity.WORKER))
