"""``baton top``: pools, workers, rates and latencies of a running cluster, again and again."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.status import format_bytes, table
from core.credentials import Credentials
from core.errors import ConfigError, WorkerLost
from core.ids import Incarnation, WorkerId
from core.types import ClusterStatus, RequestRecord, WorkerLoad, WorkerStatus
from rpc.clients import RouterClient

WINDOW_S = 30.0
"""Over which latencies are told."""
MAX_RECORDS = 1000
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The cluster at one moment."""

    at: float
    status: ClusterStatus
    records: tuple[RequestRecord, ...]
    """Newest first."""


async def show_top(
    router_address: str, *, interval_s: float, num_looks: int, credentials: Credentials | None = None
) -> int:
    """Until it is interrupted, or after ``num_looks`` (0: no end). Raises ConfigError when the router does not answer
    at first; later it says so and goes on."""
    before: Look | None = None
    is_terminal, number = sys.stdout.isatty(), 0
    while True:
        try:
            now = await _look(router_address, credentials)
        except WorkerLost:
            if before is None:
                raise ConfigError(
                    f"no router answers at {router_address}: start a cluster with `baton up`, or name it with --router"
                ) from None
            text = f"the router at {router_address} does not answer"
        else:
            text, before = render(before, now), now
        number += 1
        print(f"{CLEAR if is_terminal else ''}{text}", flush=True)
        if number == num_looks:
            return 0
        await asyncio.sleep(interval_s)


async def _look(router_address: str, credentials: Credentials | None) -> Look:
    async with RouterClient(router_address, credentials) as router:
        status = await router.status()
        found = await router.find_records("", MAX_RECORDS)
    return Look(at=time.monotonic(), status=status, records=found.records)


def render(before: Look | None, now: Look) -> str:
    """One screen. Rates are those since ``before``; without it there are none."""
    status = now.status
    head = (
        f"{sum(worker.load.num_running for worker in status.workers)} running, {status.num_waiting} waiting at the "
        f"router, {status.num_placements} placed"
    )
    pools = [(pool.model, pool.role, f"{pool.ready}/{pool.desired}", pool.problem or "-") for pool in status.pools]
    workers = [_worker_row(worker, before, now) for worker in status.workers]
    titles = ("WORKER", "STATE", "RUN", "WAIT", "KV", "BUSY", "PROMPT/S", "TOKENS/S", "MOVED/S")
    parts = [
        head,
        table(("MODEL", "POOL", "READY", "PROBLEM"), pools),
        table(titles, workers) if workers else "no worker has joined",
        _latencies(now),
    ]
    return "\n\n".join(parts)


def _worker_row(worker: WorkerStatus, before: Look | None, now: Look) -> tuple[str, ...]:
    registration, load = worker.registration, worker.load
    blocks = load.blocks
    used = blocks.total - blocks.free - blocks.cached
    return (
        registration.worker_id,
        str(worker.state),
        str(load.num_running),
        str(load.num_waiting),
        f"{used / max(1, blocks.total):.0%}",
        *_rates(load, _load_of(before, registration.worker_id, registration.incarnation), before, now),
    )


def _load_of(before: Look | None, worker_id: WorkerId, incarnation: Incarnation) -> WorkerLoad | None:
    """Counters of another incarnation are no beginning."""
    for worker in () if before is None else before.status.workers:
        if (worker.registration.worker_id, worker.registration.incarnation) == (worker_id, incarnation):
            return worker.load
    return None


def _rates(load: WorkerLoad, old: WorkerLoad | None, before: Look | None, now: Look) -> tuple[str, ...]:
    if old is None or before is None or now.at <= before.at:
        return ("-",) * 4
    seconds = now.at - before.at
    moved, moved_before = (sum(n for _, n in one.kv_bytes_received) for one in (load, old))
    return (
        f"{min(1.0, max(0.0, load.busy_s - old.busy_s) / seconds):.0%}",
        f"{(load.prompt_tokens_computed - old.prompt_tokens_computed) / seconds:.0f}",
        f"{(load.tokens_generated - old.tokens_generated) / seconds:.0f}",
        f"{format_bytes((moved - moved_before) / seconds)}",
    )


def _latencies(now: Look) -> str:
    """Of the requests that ended within the window."""
    recent = [record for record in now.records if record.age_s <= WINDOW_S]
    answered = [record for record in recent if record.ttft_s and record.outcome in ("stop", "length")]
    failed = len(recent) - len(answered)
    span_s = WINDOW_S
    if len(now.records) == MAX_RECORDS:  # the window is longer than what was asked for reaches
        span_s = max(1e-3, min(WINDOW_S, now.records[-1].age_s))
    head = f"last {span_s:.0f} s: {len(answered) / span_s:.1f} requests/s answered, {failed} not"
    gaps = [
        (record.duration_s - record.ttft_s) / (record.num_completion_tokens - 1)
        for record in answered
        if record.num_completion_tokens > 1
    ]
    rows = [
        _quantiles("time to first token", [record.ttft_s for record in answered]),
        _quantiles("time per token", gaps),
        _quantiles("whole request", [record.duration_s for record in answered]),
    ]
    return f"{head}\n{table(('LATENCY', 'P50', 'P95', 'P99'), rows)}"


def _quantiles(name: str, seconds: Sequence[float]) -> tuple[str, ...]:
    if not seconds:
        return name, "-", "-", "-"
    ordered = sorted(seconds)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)]
    return name, *(f"{1e3 * one:.1f} ms" if one < 1 else f"{one:.2f} s" for one in at)
