"""``baton status``: what the router knows of the cluster, for people and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from core.credentials import Credentials
from core.errors import ConfigError, WorkerLost
from core.ids import format_incarnation
from core.types import ClusterStatus, ExecutionKind, ScalingStatus, WorkerStatus
from rpc.clients import RouterClient


async def ask_router(router_address: str, credentials: Credentials | None = None) -> ClusterStatus:
    """Raises ConfigError when it does not answer."""
    async with RouterClient(router_address, credentials) as router:
        try:
            return await router.status()
        except WorkerLost as error:
            raise ConfigError(
                f"no router answers at {router_address} ({error.message}): start a cluster with `baton up`, or name it "
                "with --router"
            ) from None


async def show_status(router_address: str, *, as_json: bool, credentials: Credentials | None = None) -> int:
    """Ask the router and print. Raises ConfigError when it does not answer."""
    status = await ask_router(router_address, credentials)
    print(json.dumps(to_json(status), indent=2) if as_json else render(status))
    return 0


def to_json(status: ClusterStatus) -> dict[str, object]:
    """The stable machine-readable form. Incarnations are strings: JSON readers lose 64-bit numbers."""
    return {
        "router": {
            "incarnation": format_incarnation(status.router_incarnation),
            "pid": status.router_pid,
            "http_address": status.router_http_address,
            "num_placements": status.num_placements,
            "num_waiting": status.num_waiting,
        },
        "models": [asdict(model) for model in status.models],
        "pools": [asdict(pool) for pool in status.pools],
        "autoscaler": [{**asdict(one), "needs": dict(one.needs)} for one in status.scaling],
        "workers": [_worker_to_json(worker) for worker in status.workers],
        "gateways": [
            {**asdict(gateway), "incarnation": format_incarnation(gateway.incarnation)} for gateway in status.gateways
        ],
    }


def _worker_to_json(worker: WorkerStatus) -> dict[str, object]:
    registration, load = worker.registration, worker.load
    return {
        "worker_id": registration.worker_id,
        "incarnation": format_incarnation(registration.incarnation),
        "model": registration.model.name,
        "role": registration.role,
        "revision": registration.revision,
        "state": worker.state,
        "next_role": worker.next_role,
        "drain_left_s": load.drain_left_s,
        "pid": registration.pid,
        "hostname": registration.hostname,
        "address": registration.address,
        "http_address": registration.http_address,
        "heartbeat_age_s": round(worker.heartbeat_age_s, 3),
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "queued_prompt_tokens": load.queued_prompt_tokens,
        "block_size": registration.model.block_size,
        "block_bytes": registration.block_bytes,
        "blocks": asdict(load.blocks),
        "num_leases": load.num_leases,
        "held_bytes": load.held_bytes,
        "num_transfers": load.num_transfers,
        "transfer_backend": registration.transfer_backend,
        "kv_bytes_received": dict(load.kv_bytes_received),
        "kv_bytes_sent": dict(load.kv_bytes_sent),
        "broken_pairs": [worker_id for worker_id, _ in load.broken_pairs],
        "prompt_tokens_computed": load.prompt_tokens_computed,
        "tokens_generated": load.tokens_generated,
    }


def render(status: ClusterStatus) -> str:
    """Three tables that fit a terminal, below what is unusual."""
    pools = [(pool.model, pool.role, f"{pool.ready}/{pool.desired}") for pool in status.pools]
    problems = "".join(f"\n! {pool.model} {pool.role}: {pool.problem}" for pool in status.pools if pool.problem)
    scaling = [_scaling_row(one) for one in status.scaling]
    workers = [_worker_row(worker) for worker in status.workers]
    gateways = [
        (gateway.gateway_id, str(gateway.pid), gateway.http_address, str(gateway.num_requests))
        for gateway in status.gateways
    ]
    head = (
        f"router  pid {status.router_pid}  http {status.router_http_address}"
        f"  {status.num_placements} placements, {status.num_waiting} waiting"
    )
    mocks = ", ".join(model.name for model in status.models if model.execution is ExecutionKind.MOCK)
    return "\n\n".join(
        (
            head,
            *([f"MOCK EXECUTION: no model is run, all answers of {mocks} are made up"] if mocks else []),
            table(("MODEL", "POOL", "READY"), pools) + problems,
            *([table(("AUTOSCALER", "MODE", "DECISION", "TARGET", "WHY"), scaling)] if scaling else []),
            table(
                ("WORKER", "ROLE", "STATE", "PID", "INCARNATION", "RUN", "WAIT", "KV BLOCKS", "KV RECEIVED", "HTTP"),
                workers,
            ),
            table(("GATEWAY", "PID", "HTTP", "REQUESTS"), gateways),
        )
    )


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    registration, load = worker.registration, worker.load
    blocks = load.blocks
    kinds = (("custody", blocks.custody), ("use", blocks.in_use), ("leased", blocks.leased), ("cached", blocks.cached))
    used = ", ".join(f"{count} {kind}" for kind, count in kinds if count) or "none used"
    received = ", ".join(f"{format_bytes(number)} {name}" for name, number in load.kv_bytes_received) or "-"
    return (
        registration.worker_id,
        str(registration.role),
        _state(worker),
        str(registration.pid),
        format_incarnation(registration.incarnation),
        str(load.num_running),
        str(load.num_waiting),
        f"{used} of {blocks.total}",
        received,
        registration.http_address,
    )


def _scaling_row(scaling: ScalingStatus) -> tuple[str, ...]:
    targets = " ".join(f"{size.role}={size.replicas}" for size in scaling.targets) or "-"
    return scaling.model, scaling.mode, scaling.action, targets, scaling.reason


def _state(worker: WorkerStatus) -> str:
    """``draining 12 s``, ``draining 12 s -> decode``."""
    left_s = worker.load.drain_left_s
    left = "" if left_s is None else f" {left_s:.0f} s"
    return f"{worker.state}{left}" + (f" -> {worker.next_role}" if worker.next_role is not None else "")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    )


def format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("the loop returns at its last unit")
