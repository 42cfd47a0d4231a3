"""What the page is told, as plain values: the contract between this package and the JavaScript beside it.

Incarnations are strings (a script's numbers have 53 bits), durations are seconds, ages count back from the message.
"""

from dataclasses import asdict

from core import types as t
from core.ids import format_incarnation
from core.reasons import REASONS

Value = dict[str, object]


def news_value(news: t.ClusterNews) -> Value:
    status = news.status
    return {
        "router": {
            "incarnation": format_incarnation(status.router_incarnation),
            "pid": status.router_pid,
            "http_address": status.router_http_address,
        },
        "num_placements": status.num_placements,
        "num_waiting": status.num_waiting,
        "pools": [asdict(pool) for pool in status.pools],
        "workers": [worker_value(worker) for worker in status.workers],
        "gateways": [_gateway_value(gateway) for gateway in status.gateways],
        "scaling": [_scaling_value(scaling) for scaling in status.scaling],
        "pairs": [_pair_value(pair) for pair in news.pairs],
        "events": [asdict(event) for event in news.events],
        "samples": [asdict(sample) for sample in news.samples],
        "requests": [row_value(record) for record in news.records],
    }


def worker_value(worker: t.WorkerStatus) -> Value:
    registration, load = worker.registration, worker.load
    return {
        "id": registration.worker_id,
        "incarnation": format_incarnation(registration.incarnation),
        "model": registration.model.name,
        "role": registration.role,
        "state": worker.state,
        "next_role": worker.next_role,
        "is_mock": registration.model.execution is t.ExecutionKind.MOCK,
        "format": registration.model.format_hash,
        "revision": registration.revision,
        "host": registration.hostname,
        "pid": registration.pid,
        "address": registration.address,
        "http_address": registration.http_address,
        "labels": dict(registration.labels),
        "heartbeat_age_s": worker.heartbeat_age_s,
        "drain_left_s": load.drain_left_s,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "max_sequences": registration.max_sequences,
        "queued_prompt_tokens": load.queued_prompt_tokens,
        "blocks": asdict(load.blocks),
        "block_bytes": registration.block_bytes,
        "num_leases": load.num_leases,
        "held_bytes": load.held_bytes,
        "num_transfers": load.num_transfers,
        "prompt_tokens_computed": load.prompt_tokens_computed,
        "tokens_generated": load.tokens_generated,
        "busy_s": load.busy_s,
    }


def row_value(record: t.RequestRecord) -> Value:
    """A request as a line of a table."""
    return {
        "id": record.request_id,
        "model": record.model,
        "outcome": record.outcome,
        "age_s": record.age_s,
        "duration_s": record.duration_s,
        "ttft_s": record.ttft_s or None,
        "itl_s": _gap_s(record),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_completion_tokens": record.num_completion_tokens,
        "attempts": record.attempts,
        "mode": record.mode,
        "prefill": record.prefill_worker,
        "decode": record.decode_worker,
    }


def record_value(record: t.RequestRecord) -> Value:
    """All of one request: its row, and what the waterfall draws."""
    return {
        **row_value(record),
        "trace_id": record.trace_id,
        "workload_class": record.workload_class,
        "transfer_bytes": record.transfer_bytes,
        "transfer_backend": record.transfer_backend,
        "timeline": [asdict(interval) for interval in record.timeline],
        "chunks": [asdict(chunk) for chunk in record.times.transfer_chunks] if record.times is not None else [],
        "attempt_records": [_attempt_value(attempt) for attempt in record.history],
    }


def _attempt_value(attempt: t.AttemptRecord) -> Value:
    placement = attempt.placement
    return {
        "attempt": attempt.attempt,
        "started_s": attempt.started_s,
        "duration_s": attempt.duration_s,
        "outcome": attempt.outcome,
        "message": attempt.message,
        "placement": None if placement is None else _placement_value(placement),
    }


def _placement_value(placement: t.Placement) -> Value:
    return {
        "mode": placement.mode,
        "prefill": _address_value(placement.prefill),
        "decode": _address_value(placement.decode),
        "reason": placement.reason,
        "why": REASONS.get(placement.reason, ""),
        "queue_s": placement.queue_s,
        "prediction": asdict(placement.prediction),
        "runner_up": placement.runner_up,
        "runner_up_prediction": asdict(placement.runner_up_prediction) if placement.runner_up else None,
    }


def _address_value(address: t.WorkerAddress | None) -> Value | None:
    if address is None:
        return None
    return {"id": address.worker_id, "incarnation": format_incarnation(address.incarnation)}


def _gateway_value(gateway: t.GatewayStatus) -> Value:
    return {**asdict(gateway), "incarnation": format_incarnation(gateway.incarnation)}


def _pair_value(pair: t.PairStatus) -> Value:
    return {**asdict(pair), "prefill_incarnation": format_incarnation(pair.prefill_incarnation)}


def _scaling_value(scaling: t.ScalingStatus) -> Value:
    targets = {str(target.role): target.replicas for target in scaling.targets}
    return {**asdict(scaling), "targets": targets, "needs": {str(role): need for role, need in scaling.needs}}


def _gap_s(record: t.RequestRecord) -> float | None:
    """The mean time between two tokens."""
    if not record.ttft_s or record.num_completion_tokens < 2:
        return None
    return (record.duration_s - record.ttft_s) / (record.num_completion_tokens - 1)
