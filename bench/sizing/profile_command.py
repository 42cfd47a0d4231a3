"""Runs what the command line of ``baton profile`` asks for (baton/plan_parser.py)."""

import argparse
import platform
import sys
from dataclasses import replace
from pathlib import Path

from bench.client.endpoint import Asking, Endpoint, Route, first_model
from bench.client.http import HttpClient
from bench.client.prompts import Ids, Words
from bench.sizing.fit import Laws, fit
from bench.sizing.measure import Sizes, measure
from bench.sizing.profile import Profile
from core.credentials import Credentials
from core.errors import ConfigError, ServingError
from core.types import ClusterStatus, Role, WorkerRegistration
from rpc.clients import RouterClient


async def profile(
    options: argparse.Namespace, *, url: str, router: str, key: str | None, credentials: Credentials | None = None
) -> int:
    worker, has_handoff = await worker_of(router, credentials) if not options.no_router else (None, options.handoff)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        client = HttpClient(url, headers=headers)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    try:
        model = options.model or await first_model(client)
        words = Ids(seed=options.seed) if options.prompts == "ids" else Words(seed=options.seed)
        endpoint = Endpoint(client, Asking(model=model, route=Route.COMPLETIONS, words=words))
        measured = await measure(endpoint, _sizes(options, worker), has_handoff=has_handoff, show=_show)
    finally:
        client.close()
    where = options.hardware or f"{platform.processor() or platform.machine()}, as {url} serves it"
    laws = fit(measured, where=where)
    found = with_facts(laws, worker, model=model, hardware=where)
    for each in found.fits:
        print(f"{each.name:14} R2 {each.r2:.4f}")
    _write(options.out, found.model_dump_json(indent=2) + "\n")
    return 0


def with_facts(laws: Laws, worker: WorkerRegistration | None, *, model: str, hardware: str) -> Profile:
    """The laws, and what a worker says of itself."""
    found = Profile(costs=laws.costs, first_s=laws.first_s, fits=laws.fits, model=model, hardware=hardware)
    if worker is None:
        return found
    facts = {
        "num_kv_tokens": worker.num_blocks * worker.model.block_size,
        "block_size": worker.model.block_size,
        "max_sequences": worker.max_sequences,
        "max_step_tokens": worker.max_step_tokens,
        "max_mixed_tokens": worker.max_mixed_tokens or found.max_mixed_tokens,
    }
    return found.model_copy(update=facts)


async def worker_of(router: str, credentials: Credentials | None = None) -> tuple[WorkerRegistration, bool]:
    """A worker that writes answers, and whether prompts are read elsewhere. Raises ConfigError where there is more than
    one of a role: which one answered would not be known."""
    client = RouterClient(router, credentials)
    try:
        status = await client.status()
    except ServingError as error:
        raise ConfigError(
            f"the router at {router} does not answer ({error.message}): name it (--router), or measure without its "
            "facts (--no-router)"
        ) from None
    finally:
        await client.close()
    return _one_of_each(status)


def _one_of_each(status: ClusterStatus) -> tuple[WorkerRegistration, bool]:
    by_role: dict[Role, list[WorkerRegistration]] = {}
    for each in status.workers:
        by_role.setdefault(each.registration.role, []).append(each.registration)
    several = [f"{len(found)} of the role {role}" for role, found in by_role.items() if len(found) > 1]
    if several or len(by_role) > 2:
        raise ConfigError(
            f"the cluster has {', '.join(several) or 'workers of three roles'}: profile one with a worker of each role"
        )
    writer = by_role.get(Role.DECODE) or by_role.get(Role.UNIFIED)
    if not writer:
        raise ConfigError("the cluster has no worker that writes answers: start it, or name another --router")
    return writer[0], Role.PREFILL in by_role


def _sizes(options: argparse.Namespace, worker: WorkerRegistration | None) -> Sizes:
    sizes = Sizes.within(
        max_step_tokens=min(options.longest, worker.max_step_tokens if worker else options.longest),
        max_sequences=min(options.batches, worker.max_sequences if worker else options.batches),
        max_context=worker.model.max_context if worker else options.longest + 64,
        repeats=options.repeats,
    )
    return replace(sizes, prompts=tuple(sizes.prompts), batches=tuple(sizes.batches))


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
