"""What a role is given: the engine, the thread that runs it, the memory that transfers, and who we are."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from core.clock import Clock
from core.config import ClusterConfig, ModelConfigSection, PoolConfig
from core.credentials import Credentials
from core.errors import ERRORS_BY_SLUG, InvalidRequest, ModelNotFound, StaleIncarnation, WorkerDraining
from core.failpoints import Failpoints
from core.ids import Incarnation, RequestId, WorkerId
from core.kv import KVFormat, KVGeometry
from core.telemetry import Telemetry
from core.types import GenerateRequest, Role, SamplingParams, WorkerAddress, WorkerLoad
from engine.engine import Engine, StepResult
from engine.grammar import CompiledGrammar
from kvtransfer.digest import Digester
from kvtransfer.pairs import Pairs
from rpc.server import RpcServer
from worker.choices import check_choices
from worker.observed import Observed
from worker.proof import Proof
from worker.samples import SampleLog
from worker.step_thread import StepThread
from worker.tickets import Tickets


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """One worker, composed. ``is_draining`` is the only field that changes once it is."""

    config: ClusterConfig
    model: ModelConfigSection
    pool_config: PoolConfig
    role: Role
    worker_id: WorkerId
    incarnation: Incarnation
    clock: Clock
    telemetry: Telemetry
    failpoints: Failpoints
    engine: Engine
    steps: StepThread
    digester: Digester
    on_broken: Callable[[BaseException], None]
    """Called when something that the worker cannot do without has failed: it ends, and is restarted."""
    pairs: Pairs = field(default_factory=Pairs)
    """What became of hand-offs with each peer."""
    samples: SampleLog = field(default_factory=SampleLog)
    """What steps and hand-offs took."""
    proof: Proof = field(default_factory=Proof)
    """That a hand-off was tried out, before the worker is ready."""
    observed: Observed = field(default_factory=lambda: Observed({}))
    attempts_ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(("ok", *ERRORS_BY_SLUG), 0)))
    """Attempts that are over here, by outcome: ``ok`` or a slug."""
    credentials: Credentials | None = None
    """By which it knows the cluster's other processes; None without TLS."""
    tickets: Tickets = field(default_factory=Tickets)
    """Those it shows, and how it checks those of others."""
    is_draining: bool = False

    @property
    def format(self) -> KVFormat:
        return self.engine.format

    @property
    def geometry(self) -> KVGeometry:
        return self.engine.geometry

    async def compile_grammar(self, sampling: SamplingParams) -> CompiledGrammar | None:
        """The request's grammar, compiled off this loop and off the steps; each choice starts it anew. Raises
        InvalidRequest for what is no grammar or too large a one, QueueFull."""
        if not sampling.grammar:
            return None
        grammars = self.engine.grammars
        try:
            async with asyncio.timeout(grammars.wait_limit_s):
                return await asyncio.shield(asyncio.wrap_future(grammars.submit(sampling.grammar)))
        except TimeoutError:
            raise grammars.too_slow() from None

    def check(self, request: GenerateRequest, incarnation: Incarnation) -> None:
        """Refuse what was meant for somebody else, or what this worker cannot do. Raises a typed error."""
        if incarnation != self.incarnation:
            raise StaleIncarnation(f"{self.worker_id} was restarted since the placement", worker_id=self.worker_id)
        self.check_serving()
        if request.model != self.model.name:
            raise ModelNotFound(f"{self.worker_id} serves {self.model.name!r}, not {request.model!r}")
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_choices(request)
        vocab_size = self.engine.limits.vocab_size
        if max(request.prompt_token_ids) >= vocab_size:
            raise InvalidRequest(f"a prompt token id is not below the vocabulary size {vocab_size}", param="prompt")

    def check_serving(self) -> None:
        """Raises WorkerDraining."""
        if self.is_draining:
            raise WorkerDraining(f"{self.worker_id} is draining", worker_id=self.worker_id)


class WorkerRole(Protocol):
    """What makes a worker a prefill or a decode worker. One instance for one worker."""

    def add_services(self, server: RpcServer) -> None: ...

    async def start(self) -> None: ...

    def meet(self, peers: tuple[WorkerAddress, ...]) -> None:
        """The live workers of the other role, each time they have changed. New ones are to be tried out."""

    def on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        """On the event loop, after each step; times are ``time.monotonic``."""

    def fill_load(self, load: WorkerLoad) -> WorkerLoad:
        """Add what only the role knows to a heartbeat."""

    def begin_drain(self) -> None:
        """New work is refused from now on: hand back at once what has not begun and may as well begin elsewhere."""

    def is_idle(self) -> bool:
        """Nothing is queued, running, held or in transfer: a draining worker may exit."""

    async def stop(self) -> None:
        """End everything at once; whoever waits gets it back as WorkerDraining."""


class Tombstones:
    """Attempts that are over, remembered for a while, so that a message that was overtaken by its abort finds out."""

    def __init__(self, clock: Clock, keep_s: float) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._until: dict[tuple[RequestId, int], float] = {}

    def add(self, request_id: RequestId, attempt: int) -> None:
        """Attempt 0 stands for every attempt of the request."""
        now = self._clock.now()
        if len(self._until) > 1024:
            self._until = {key: until for key, until in self._until.items() if until > now}
        self._until[request_id, attempt] = now + self._keep_s

    def __contains__(self, key: tuple[RequestId, int]) -> bool:
        now = self._clock.now()
        return any(self._until.get((key[0], attempt), 0.0) > now for attempt in (key[1], 0))
