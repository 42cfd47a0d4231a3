"""Short ways to say what a cell looks like."""

from core.ids import BlockHash, GatewayId, HandoffId, Incarnation, RequestId, WorkerId
from core.kv import BlockCounts
from core.types import (
    GatewayReport,
    HeldHandoff,
    ModelRecord,
    PlaceRequest,
    Role,
    WorkerAddress,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from router.policy import Candidate

MODEL = "tiny"


def make_registration(
    name: str = "d0",
    incarnation: int = 1,
    role: Role = Role.DECODE,
    *,
    model: str = MODEL,
    format_hash: str = "f0",
    num_blocks: int = 100,
    block_size: int = 16,
    max_context: int = 8192,
    address: str = "",
) -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        model=ModelRecord(
            name=model, format_hash=format_hash, block_size=block_size, max_context=max_context, vocab_size=1000
        ),
        address=address or f"{name}:{incarnation}",
        http_address=f"{name}:80",
        pid=4242,
        hostname="here",
        num_blocks=num_blocks,
        block_bytes=1024,
        max_sequences=8,
        max_step_tokens=256,
        transfer_backend="nixl",
    )


def make_load(
    state: WorkerState = WorkerState.READY, *, in_use: int = 0, total: int = 100, **rest: object
) -> WorkerLoad:
    blocks = BlockCounts(total=total, custody=0, in_use=in_use, leased=0, cached=0, free=total - in_use)
    return WorkerLoad(state=state, blocks=blocks, **rest)  # type: ignore[arg-type]


def make_request(
    request_id: str = "r0",
    *,
    model: str = MODEL,
    num_prompt_tokens: int = 100,
    deadline_s: float = 60.0,
    priority: int = 0,
    age_s: float = 0.0,
    tenant: str = "",
    attempt: int = 1,
    gateway: tuple[str, int] = ("g0", 7),
    excluded_workers: tuple[tuple[str, int], ...] = (),
    excluded_pairs: tuple[tuple[str, str], ...] = (),
    holder: WorkerAddress | None = None,
    block_hashes: tuple[BlockHash, ...] = (),
) -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId(request_id),
        model=model,
        attempt=attempt,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=64,
        block_hashes=block_hashes,
        gateway_id=GatewayId(gateway[0]),
        gateway_incarnation=Incarnation(gateway[1]),
        deadline_s=deadline_s,
        age_s=age_s,
        priority=priority,
        tenant=tenant,
        excluded_workers=tuple((WorkerId(name), Incarnation(number)) for name, number in excluded_workers),
        excluded_pairs=tuple((WorkerId(p), Incarnation(1), WorkerId(d), Incarnation(1)) for p, d in excluded_pairs),
        held=None if holder is None else HeldHandoff(handoff_id=HandoffId("held"), holder=holder),
    )


def chain(name: str, length: int) -> tuple[BlockHash, ...]:
    """Hashes of the first blocks of a prompt with this name."""
    return tuple(BlockHash(f"{name}{number}".encode()) for number in range(length))


def make_report(gateway_id: str = "g0", incarnation: int = 7, num_requests: int = 0) -> GatewayReport:
    return GatewayReport(
        gateway_id=GatewayId(gateway_id),
        incarnation=Incarnation(incarnation),
        http_address="g:80",
        pid=1,
        num_requests=num_requests,
    )


def make_candidate(
    name: str,
    role: Role = Role.DECODE,
    *,
    incarnation: int = 1,
    state: WorkerState = WorkerState.READY,
    model: str = MODEL,
    format_hash: str = "f0",
    revision: str = "",
    num_blocks: int = 100,
    used_blocks: int = 0,
    queued_prompt_tokens: int = 0,
    num_requests: int = 0,
    num_placed: int = 0,
    **more: object,
) -> Candidate:
    return Candidate(
        address=WorkerAddress(worker_id=WorkerId(name), incarnation=Incarnation(incarnation), address=f"{name}:1"),
        role=role,
        state=state,
        model=model,
        pairing=(format_hash, revision),
        num_blocks=num_blocks,
        block_size=16,
        max_sequences=8,
        max_step_tokens=256,
        block_bytes=1024,
        used_blocks=used_blocks,
        queued_prompt_tokens=queued_prompt_tokens,
        num_requests=num_requests,
        num_placed=num_placed,
        **more,  # type: ignore[arg-type]
    )
