"""``baton doctor pair P D``: what moves KV between two live workers, and how fast, for people and as JSON.

The decode worker does the work: it shakes hands (dialling if it must), reads the prefill worker's canary over every
link that both have, measures each, and uses the best from then on. Requests go on meanwhile.
"""

import json
from dataclasses import asdict

from baton.status import ask_router, table
from core.credentials import Credentials
from core.errors import ConfigError, WorkerLost
from core.handoff import LinkMeasure, PairCheck
from core.types import ClusterStatus, Role, WorkerAddress, WorkerRegistration, WorkerState, WorkerStatus
from deploy.launcher import EXIT_FAILED
from rpc.clients import DecodeClient


async def check_pair(
    router_address: str, prefill: str, decode: str, *, as_json: bool, credentials: Credentials | None = None
) -> int:
    """Print what was found; 1 when no link is usable. Raises ConfigError for what is no pair of this cluster, PeerLost
    or WorkerLost when one of the two does not answer."""
    status = await ask_router(router_address, credentials)
    p, d = find(status, prefill, Role.PREFILL), find(status, decode, Role.DECODE)
    if p.model.name != d.model.name:
        raise ConfigError(f"{prefill} serves {p.model.name!r} and {decode} {d.model.name!r}: they are no pair")
    check = await ask_pair(p, d, credentials)
    print(json.dumps(to_json(check), indent=2) if as_json else render(check))
    return 0 if check.is_good else EXIT_FAILED


async def ask_pair(
    prefill: WorkerRegistration, decode: WorkerRegistration, credentials: Credentials | None = None
) -> PairCheck:
    """Raises PeerLost or WorkerLost when one of the two does not answer."""
    async with DecodeClient(_address(decode), credentials) as client:
        return await client.check_pair(_address(prefill))


def find(status: ClusterStatus, worker_id: str, role: Role) -> WorkerRegistration:
    """The live worker of that id and role. Raises ConfigError, or WorkerLost for one that is gone."""
    of_role = [each.registration.worker_id for each in status.workers if each.registration.role is role]
    known = f"{role} workers: {', '.join(of_role) or 'none'} (`baton status` shows all)"
    worker = next((each for each in status.workers if each.registration.worker_id == worker_id), None)
    if worker is None:
        raise ConfigError(f"no worker {worker_id!r} is registered; {known}")
    if worker.registration.role is not role:
        raise ConfigError(
            f"{worker_id} is a {worker.registration.role} worker: name the prefill worker first, then the decode "
            f"worker; {known}"
        )
    if worker.state in (WorkerState.LOST, WorkerState.SUSPECT):
        raise WorkerLost(_how_lost(worker))
    return worker.registration


def _how_lost(worker: WorkerStatus) -> str:
    return (
        f"{worker.registration.worker_id} is {worker.state}: its last heartbeat is {worker.heartbeat_age_s:.1f} s old; "
        "look at its log, or wait until its launcher has restarted it"
    )


def to_json(check: PairCheck) -> dict[str, object]:
    """The stable machine-readable form."""
    return {**asdict(check), "is_good": check.is_good}


def render(check: PairCheck) -> str:
    """One table and two lines for a terminal."""
    head = f"{check.prefill} > {check.decode}  circuit {check.circuit}"
    if check.circuit_why:
        head += f" (last failure: {check.circuit_why})"
    verdict = check.reason if check.is_good else f"no link is usable: {check.reason}"
    titles = ("BACKEND", "MODE", "LANE", "CONNECT", "64 BYTES", "GB/S", "MEMCPY GB/S", "SHARE", "RESULT")
    return "\n\n".join((head, table(titles, [_row(link) for link in check.links]), verdict))


def _row(link: LinkMeasure) -> tuple[str, ...]:
    memcpy = link.memcpy_bytes_per_s
    return (
        link.backend,
        str(link.mode),
        link.lane or "-",
        f"{1e3 * link.connect_s:.1f} ms",
        f"{1e6 * link.latency_s:.0f} us" if link.latency_s else "-",
        f"{link.bytes_per_s / 1e9:.2f}" if link.bytes_per_s else "-",
        f"{memcpy / 1e9:.2f}" if memcpy else "-",
        f"{link.bytes_per_s / memcpy:.0%}" if memcpy else "-",
        link.slug or ("used" if link.is_used else "good"),
    )


def _address(worker: WorkerRegistration) -> WorkerAddress:
    return WorkerAddress(worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address)
