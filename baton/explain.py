"""``baton explain REQUEST_ID``: where a request went and why, what was expected of it, and what happened instead."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from baton.status import format_bytes, table
from core.credentials import Credentials
from core.errors import ConfigError, WorkerLost
from core.ids import format_incarnation
from core.reasons import REASONS
from core.types import AttemptRecord, Placement, Prediction, RequestRecord, RequestRecords, Stage, WorkerAddress
from rpc.clients import RouterClient

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""What an answer's own id has before the request's."""


async def explain(
    router_address: str, request_id: str, *, as_json: bool, credentials: Credentials | None = None
) -> int:
    """Ask the router and print. Raises ConfigError when it does not answer or has no record of the request."""
    records = await find_records(router_address, request_id, credentials)
    print(json.dumps([to_json(record) for record in records], indent=2) if as_json else render(records))
    return 0


async def find_records(
    router_address: str, request_id: str, credentials: Credentials | None = None
) -> list[RequestRecord]:
    """Of a request and of the further prompts of its call, in their order. Raises ConfigError where there is none."""
    request_id = plain_id(request_id)
    async with RouterClient(router_address, credentials) as router:
        try:
            found = await router.find_records(request_id)
        except WorkerLost:
            raise ConfigError(
                f"no router answers at {router_address}: start a cluster with `baton up`, or name it with --router"
            ) from None
    if not found.records:
        raise ConfigError(why_unknown(request_id, found))
    return sorted(found.records, key=lambda record: (len(record.request_id), record.request_id))


def plain_id(given: str) -> str:
    """The request's id, of which an answer's id is made."""
    for prefix in ANSWER_PREFIXES:
        given = given.removeprefix(prefix)
    return given.strip()


def why_unknown(request_id: str, asked: RequestRecords) -> str:
    if not asked.num_kept:
        reach = "it has none at all yet: records are lost when it restarts"
    else:
        reach = f"its {asked.num_kept} records (at most {asked.max_kept}) reach back {_ago(asked.oldest_age_s)}"
    return (
        f"the router has no record of a request {request_id!r}: {reach}. A record comes some moments after the request "
        "has ended; what a gateway itself refused has none. router.max_records says how many are kept"
    )


def to_json(record: RequestRecord) -> dict[str, object]:
    """The stable machine-readable form. Incarnations are strings: JSON readers lose 64-bit numbers."""
    return {
        **asdict(record),
        "stages": dict(record.stages),
        "history": [{**asdict(one), "placement": _placement_to_json(one.placement)} for one in record.history],
    }


def _placement_to_json(placement: Placement | None) -> dict[str, object] | None:
    if placement is None:
        return None
    told = asdict(placement)
    del told["ticket"]
    return told | {
        "path": path_of(placement),
        "decode": _address_to_json(placement.decode),
        "prefill": None if placement.prefill is None else _address_to_json(placement.prefill),
    }


def _address_to_json(address: WorkerAddress) -> dict[str, object]:
    return {**asdict(address), "incarnation": format_incarnation(address.incarnation)}


def path_of(placement: Placement) -> str:
    """As the policy names paths: ``split:p0>d0``, ``local:d0``."""
    workers = (placement.prefill, placement.decode)
    return f"{placement.mode}:{'>'.join(worker.worker_id for worker in workers if worker is not None)}"


# -- for people -------------------------------------------------------------------------------------------------------


def render(records: Sequence[RequestRecord]) -> str:
    """One screen about the first; the other prompts of its call are named."""
    record = records[0]
    parts = [_head(record)]
    placed = [one for one in record.history if one.placement is not None]
    if placed:
        parts.append(_choice(placed[-1]))
    parts.append(_times(record, placed[-1] if placed else None))
    if len(record.history) > 1 or any(one.outcome != "ok" for one in record.history):
        parts.append(_attempts(record))
    if len(records) > 1:
        others = ", ".join(other.request_id for other in records[1:])
        parts.append(f"The same call asked for more prompts, each explained by its own id: {others}")
    return "\n\n".join(parts)


def _head(record: RequestRecord) -> str:
    first = f"first token after {_time(record.ttft_s)}" if record.ttft_s else "no token came"
    return (
        f"request {record.request_id}  model {record.model}  ended: {record.outcome}\n"
        f"{record.num_prompt_tokens} prompt tokens, {record.num_completion_tokens} answer tokens in "
        f"{_time(record.duration_s)}; {first}"
    )


def _choice(attempt: AttemptRecord) -> str:
    """Which path, why, and what the second best was."""
    placement = attempt.placement
    assert placement is not None
    why = REASONS.get(placement.reason)
    lines = [f"placed on   {path_of(placement)}  cost {_time(placement.prediction.cost_s)}"]
    lines.append(f"because     {placement.reason}{f': {why}' if why else ''}")
    if placement.runner_up:
        second = placement.runner_up_prediction
        lines.append(
            f"instead of  {placement.runner_up}  cost {_time(second.cost_s)}"
            f"  (first token {_time(second.ttft_s)}, {second.num_cached_tokens} tokens cached)"
        )
    return "\n".join(lines)


def _times(record: RequestRecord, last: AttemptRecord | None) -> str:
    """What was expected of the last attempt beside what happened, stage by stage."""
    prediction = last.placement.prediction if last is not None and last.placement is not None else Prediction()
    expected: dict[str, float] = {
        Stage.PREFILL_QUEUE: prediction.prefill_wait_s,
        Stage.PREFILL: prediction.prefill_s,
        Stage.TRANSFER: prediction.transfer_s,
    }
    actual = dict(record.stages)
    stages = [stage for stage in dict.fromkeys([*actual, *expected]) if stage in actual or expected[stage]]
    rows = [(stage, _expected(expected.get(stage, 0.0)), _time(actual.get(stage, 0.0))) for stage in stages]
    rows.append(("to first token", _expected(prediction.ttft_s), _expected(record.ttft_s)))
    if prediction.itl_harm_s:
        rows.append(("delay of other answers", _expected(prediction.itl_harm_s), "-"))
    rows.append(("cached tokens", str(prediction.num_cached_tokens), str(record.num_cached_tokens)))
    if record.transfer_bytes:
        moved = f"{format_bytes(record.transfer_bytes)} by {record.transfer_backend}"
        rows.append(("moved", f"all but {prediction.num_kept_tokens} tokens", moved))
    return table(("STAGE", "PREDICTED", "ACTUAL"), rows)


def _attempts(record: RequestRecord) -> str:
    rows = []
    for one in record.history:
        placement = one.placement
        why = f"{one.outcome}: {one.message}" if one.message else one.outcome
        rows.append(
            (
                str(one.attempt),
                _time(one.started_s),
                _time(one.duration_s),
                path_of(placement) if placement else "not placed",
                placement.reason if placement else "-",
                _expected(placement.prediction.ttft_s) if placement else "-",
                why if len(why) <= 100 else f"{why[:99]}…",
            )
        )
    shown = table(("ATTEMPT", "AFTER", "LASTED", "PLACED ON", "BECAUSE", "PREDICTED", "ENDED"), rows)
    num_before = record.attempts - len(record.history)
    return f"{shown}\n({num_before} more before these)" if num_before > 0 else shown


def _expected(seconds: float) -> str:
    """0 says that nothing is known."""
    return _time(seconds) if seconds else "-"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
