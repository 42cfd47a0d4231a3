"""Sizes under Kubernetes: what the router wants becomes the replicas of Deployments and LeaderWorkerSets.

Kubernetes starts, restarts and ends the workers; this only says how many, through ``/scale``. There is one writer of a
size: a workload that somebody else has scaled is set back, and that is logged. The sizes that were said live are
remembered in a ConfigMap, so that a cell whose router and placer restart together keeps them.
"""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from core.config import ClusterConfig, KubernetesConfig
from core.errors import ConfigError, ServingError
from core.tasks import TaskScope
from core.types import LauncherReport, PoolProblem, PoolSize, Role
from deploy.launcher import LaunchError
from rpc.clients import RouterClient

log = logging.getLogger(__name__)

RECHECK_S = 5.0
RETRY_S = 1.0
CALL_S = 10.0
MODEL = "baton.dev/model-name"
"""Annotation of a workload: the model whose worker each of its pods is. Its role is the component of its labels."""
NODES = "baton.dev/nodes"
COMPONENT = "app.kubernetes.io/component"
MEMORY_KEY = "sizes.json"
KINDS = ("apis/apps/v1/{}/deployments", "apis/leaderworkerset.x-k8s.io/v1/{}/leaderworkersets")

Pool = tuple[str, Role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One pool as Kubernetes has it."""

    path: str
    replicas: int
    nodes: int
    """Pods, and so workers, of each replica."""
    problem: str


class KubernetesApi:
    """The few calls that are needed. Raises LaunchError for one that fails."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        verify: bool | ssl.SSLContext = True
        if config.ca_file is not None and config.api.startswith("https:"):
            try:
                verify = ssl.create_default_context(cafile=config.ca_file)
            except OSError as error:
                raise ConfigError(f"launcher.kubernetes.ca_file: cannot read {config.ca_file}: {error}") from None
        self._client = httpx.AsyncClient(base_url=config.api, timeout=CALL_S, verify=verify, trust_env=False)
        self._namespace = f"namespaces/{config.namespace or _text(config.namespace_file, 'namespace_file')}"

    async def close(self) -> None:
        await self._client.aclose()

    async def workloads(self) -> Mapping[Pool, Workload]:
        """Those of the release, whatever their kind. A kind that this Kubernetes does not know has none."""
        found: dict[Pool, Workload] = {}
        selector = {"labelSelector": f"app.kubernetes.io/instance={self._config.release}"}
        for kind in KINDS:
            path = kind.format(self._namespace)
            answer = await self._call("GET", path, params=selector, may_be_missing=True)
            for one in answer.get("items", ()):
                metadata = one["metadata"]
                model = metadata.get("annotations", {}).get(MODEL)
                if model is not None:
                    pool = (model, Role(metadata["labels"][COMPONENT]))
                    found[pool] = _workload(f"{path}/{metadata['name']}", one)
        return found

    async def scale(self, workload: Workload, replicas: int) -> None:
        await self._call("PATCH", f"{workload.path}/scale", content=json.dumps({"spec": {"replicas": replicas}}))

    async def read_memory(self) -> Mapping[str, Any]:
        path = f"api/v1/{self._namespace}/configmaps/{self._config.memory}"
        text = (await self._call("GET", path)).get("data", {}).get(MEMORY_KEY, "{}")
        try:
            memory = json.loads(text)
        except ValueError:
            memory = None
        return memory if isinstance(memory, dict) else {}

    async def write_memory(self, memory: Mapping[str, Any]) -> None:
        path = f"api/v1/{self._namespace}/configmaps/{self._config.memory}"
        await self._call("PATCH", path, content=json.dumps({"data": {MEMORY_KEY: json.dumps(memory)}}))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: str | None = None,
        may_be_missing: bool = False,
    ) -> dict[str, Any]:
        headers = {"content-type": "application/merge-patch+json"} if content is not None else {}
        if self._config.token_file is not None:  # read for each call: Kubernetes renews it
            headers["authorization"] = f"Bearer {_text(self._config.token_file, 'token_file')}"
        try:
            answer = await self._client.request(method, f"/{path}", params=params, content=content, headers=headers)
            if may_be_missing and answer.status_code == httpx.codes.NOT_FOUND:
                return {}
            answer.raise_for_status()
            value: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise LaunchError(f"Kubernetes does not do as asked: {method} {path}: {error}") from None
        return value


class KubernetesPools:
    """Keeps the workloads of one release at the sizes that the router wants. ``run`` it."""

    def __init__(
        self,
        config: ClusterConfig,
        api: KubernetesApi,
        *,
        say: Callable[[str], None] = lambda text: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._say = say
        self._wall = wall
        self._sizes: dict[Pool, tuple[int, float | None]] = {
            (model.name, role): (pool.replicas, None) for model in config.models for role, pool in model.pools.items()
        }
        """(workers, when somebody said so, in Unix seconds)."""
        self._set: dict[Pool, int] = {}
        self._problems: tuple[PoolProblem, ...] = ()
        self._wake = asyncio.Event()

    async def run(self, router: RouterClient) -> None:
        """Until cancelled. A router or an API that is away is waited for."""
        scope = TaskScope("kubernetes")
        scope.spawn(self._watch(router), name="watch")
        try:
            while True:
                try:
                    await self._remember()
                    break
                except ServingError as error:
                    log.warning("what was said before is not known yet", extra={"reason": error.message})
                    await asyncio.sleep(RETRY_S)
            while True:
                self._wake.clear()
                try:
                    await self.reconcile(router)
                except ServingError as error:
                    log.warning("pools are not kept", extra={"reason": error.message})
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    async with asyncio.timeout(RECHECK_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await scope.close()

    async def reconcile(self, router: RouterClient) -> None:
        """One round. Raises a ServingError of the router's or of Kubernetes', with the rest to be done next time."""
        now = self._wall()
        mine = tuple(
            PoolSize(model=model, role=role, replicas=replicas, age_s=None if at is None else max(0.0, now - at))
            for (model, role), (replicas, at) in self._sizes.items()
        )
        sizes = await router.report_pools(LauncherReport(pools=mine, problems=self._problems))
        before = dict(self._sizes)
        for size in sizes:
            pool = (size.model, size.role)
            if pool in self._sizes:
                old_replicas, old_at = self._sizes[pool]
                at = None if size.age_s is None else now - size.age_s
                if size.replicas == old_replicas and at is not None and old_at is not None:
                    at = old_at  # the same word, told again
                self._sizes[pool] = (size.replicas, at)
        workloads = await self._api.workloads()
        for pool, (replicas, _) in self._sizes.items():
            if pool in workloads:
                await self._bring(pool, workloads[pool], replicas)
        self._problems = tuple(_problems(self._sizes, workloads))
        if self._sizes != before:
            await self._api.write_memory(
                {f"{role}/{model}": [size, at] for (model, role), (size, at) in self._sizes.items() if at is not None}
            )

    async def _bring(self, pool: Pool, workload: Workload, workers: int) -> None:
        wanted = -(-workers // workload.nodes)
        if workload.replicas == wanted:
            self._set[pool] = wanted
            return
        name = f"{pool[1]} of {pool[0]}"
        if self._set.get(pool) == wanted:
            log.warning("somebody else has scaled a pool", extra={"pool": name, "replicas": workload.replicas})
        await self._api.scale(workload, wanted)
        self._set[pool] = wanted
        self._say(f"{name}: {workload.replicas} -> {wanted} replicas")

    async def _remember(self) -> None:
        memory = await self._api.read_memory()
        for model, role in self._sizes:
            match memory.get(f"{role}/{model}"):
                case [int(replicas), int() | float() as at]:
                    self._sizes[model, role] = (replicas, float(at))
                case _:
                    pass

    async def _watch(self, router: RouterClient) -> None:
        while True:
            try:
                async with aclosing(router.watch_pools()) as changes:
                    async for _ in changes:
                        self._wake.set()
            except ServingError:
                pass  # it is restarting
            await asyncio.sleep(RETRY_S)


def _workload(path: str, one: Mapping[str, Any]) -> Workload:
    problem = ""
    for condition in one.get("status", {}).get("conditions", ()):
        if condition["type"] == "Progressing" and condition["status"] == "False":
            problem = condition.get("message") or condition.get("reason", "")
    annotations = one["metadata"].get("annotations", {})
    nodes = max(1, int(annotations.get(NODES, "1")))
    return Workload(path=path, replicas=one["spec"].get("replicas", 1), nodes=nodes, problem=problem)


def _problems(sizes: Mapping[Pool, object], workloads: Mapping[Pool, Workload]) -> list[PoolProblem]:
    found = []
    for model, role in sizes:
        workload = workloads.get((model, role))
        message = "no workload of this release has its pods" if workload is None else workload.problem
        if message:
            found.append(PoolProblem(model=model, role=role, message=message))
    return found


def _text(path: str, key: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"launcher.kubernetes.{key}: cannot read {path}: {error.strerror}") from None
