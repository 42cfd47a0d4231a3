"""``baton rollout``: all workers of a model are replaced by those of another revision, both roles in lockstep."""

import hashlib
import json
from collections.abc import Sequence

from baton.pools import follow
from baton.status import ask_router, table
from core.config import ClusterConfig, ModelConfigSection
from core.credentials import Credentials
from core.errors import ConfigError
from core.types import ClusterStatus, Rollout, WorkerState, WorkerStatus
from rpc.clients import RouterClient

REVISION_DIGITS = 8


def section_of(config: ClusterConfig, model: str, revision: str) -> ModelConfigSection:
    """The model's section with its revision: the given one, that of the section, or a digest of what it says."""
    section = config.model(model)
    name = revision or section.revision
    if not name:
        said = section.model_dump_json(exclude={"revision", "autoscale"})
        name = hashlib.sha256(said.encode()).hexdigest()[:REVISION_DIGITS]
    return section.model_copy(update={"revision": name})


async def start(
    address: str,
    config: ClusterConfig,
    model: str,
    *,
    revision: str,
    wait_s: float,
    credentials: Credentials | None = None,
) -> int:
    """Raises ConfigError where it would change nothing, or a pool is missing."""
    section = section_of(config, model, revision)
    status = await ask_router(address, credentials)
    pools = {pool.role for pool in status.pools if pool.model == model}
    if pools != set(section.pools):
        named, has = ", ".join(sorted(section.pools)), ", ".join(sorted(pools)) or "none"
        raise ConfigError(
            f"the running cluster has these pools of {model!r}: {has}; the configuration names {named}: a rollout "
            "keeps the pools"
        )
    workers = _workers(status, model)
    if workers and all(worker.registration.revision == section.revision for worker in workers):
        raise ConfigError(
            f"all workers of {model!r} are of revision {section.revision} already: change its section of the "
            "configuration, or name another revision with --revision"
        )
    rollout = Rollout(model=model, revision=section.revision, section=section.model_dump_json(), age_s=0.0)
    async with RouterClient(address, credentials) as router:
        await router.start_rollout(rollout)
    print(f"{model}: rolling out revision {section.revision}", flush=True)
    return await follow(address, lambda status: progress(status, model, section.revision), wait_s, credentials)


async def show(address: str, *, as_json: bool, credentials: Credentials | None = None) -> int:
    """What was asked for last of each model, and how far it is."""
    status = await ask_router(address, credentials)
    print(json.dumps(to_json(status), indent=2) if as_json else render(status))
    return 0


def progress(status: ClusterStatus, model: str, revision: str) -> tuple[bool, str]:
    """Whether it is over, and how far it is in one line."""
    asked = next((rollout.revision for rollout in status.rollouts if rollout.model == model), revision)
    if asked != revision:
        return True, f"{model}: revision {asked} was asked for in the meantime"
    pools = [pool for pool in status.pools if pool.model == model]
    workers = _workers(status, model)
    parts = []
    for pool in pools:
        here = [worker for worker in workers if worker.registration.role is pool.role]
        num_new = sum(_is_new(worker, revision) and worker.state is WorkerState.READY for worker in here)
        num_old = sum(not _is_new(worker, revision) for worker in here)
        parts.append(f"{pool.role} {num_new} of {pool.desired} new" + (f", {num_old} old" if num_old else ""))
    problems = [pool.problem for pool in pools if pool.problem]
    is_over = (
        not problems
        and all(_is_new(worker, revision) for worker in workers)
        and all(pool.ready == pool.desired for pool in pools)
    )
    return is_over, "; ".join((f"{model} {revision}: {', '.join(parts)}", *problems))


def to_json(status: ClusterStatus) -> list[dict[str, object]]:
    """The stable machine-readable form."""
    told: list[dict[str, object]] = []
    for rollout in status.rollouts:
        is_over, line = progress(status, rollout.model, rollout.revision)
        told.append(
            {
                "model": rollout.model,
                "revision": rollout.revision,
                "age_s": round(rollout.age_s, 3),
                "is_over": is_over,
                "progress": line,
                "workers": [
                    {
                        "worker_id": worker.registration.worker_id,
                        "role": worker.registration.role,
                        "revision": worker.registration.revision,
                        "state": worker.state,
                    }
                    for worker in _workers(status, rollout.model)
                ],
            }
        )
    return told


def render(status: ClusterStatus) -> str:
    if not status.rollouts:
        return "no rollout was asked for since the cluster was started"
    lines = [progress(status, rollout.model, rollout.revision) for rollout in status.rollouts]
    rows = [
        (worker.registration.worker_id, worker.registration.revision or "-", str(worker.state))
        for rollout in status.rollouts
        for worker in _workers(status, rollout.model)
    ]
    heads = [f"{line}{' (over)' if is_over else ''}" for is_over, line in lines]
    return "\n".join((*heads, "", table(("WORKER", "REVISION", "STATE"), rows)))


def _workers(status: ClusterStatus, model: str) -> Sequence[WorkerStatus]:
    live = (worker for worker in status.workers if worker.state is not WorkerState.LOST)
    return [worker for worker in live if worker.registration.model.name == model]


def _is_new(worker: WorkerStatus, revision: str) -> bool:
    return worker.registration.revision == revision
