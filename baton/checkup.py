"""``baton doctor``: what a cluster of this configuration needs, looked at one by one, with what to do where it lacks.

Works without a running cluster too: then only this machine is looked at.
"""

import ctypes
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from baton.doctor import ask_pair
from baton.status import table
from core.config import ClusterConfig, split_address, ucx_transports
from core.credentials import Credentials
from core.errors import ConfigError, ServingError, WorkerLost
from core.handoff import PairCheck
from core.types import ClusterStatus, Role, WorkerState, WorkerStatus
from deploy.launcher import EXIT_FAILED
from rpc.clients import RouterClient

_UNSYNCED = 0x40
"""``STA_UNSYNC`` of the kernel's clock."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    subject: str
    verdict: Verdict
    message: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


async def check_all(
    config: ClusterConfig, router_address: str, *, as_json: bool, credentials: Credentials | None = None
) -> int:
    """Print every finding; 1 when one has failed."""
    findings = [*check_models(config), *check_transfer(config), check_gpu(config), check_clock()]
    status = await _status(router_address, credentials)
    findings += check_ports(config, router_address, is_running=status is not None)
    if status is not None:
        findings += check_workers(status)
        findings += await check_pairs(config, status, credentials)
    print(json.dumps([asdict(one) for one in findings], indent=2) if as_json else render(findings))
    return EXIT_FAILED if any(one.verdict is Verdict.FAIL for one in findings) else 0


def render(findings: list[Finding]) -> str:
    rows = [(one.verdict, one.subject, one.message) for one in findings]
    todo = [f"- {one.subject}: {one.remedy}" for one in findings if one.remedy and one.verdict is not Verdict.OK]
    parts = [table(("", "CHECKED", "FOUND"), rows)]
    if todo:
        parts.append("what to do:\n" + "\n".join(todo))
    return "\n\n".join(parts)


async def _status(router_address: str, credentials: Credentials | None) -> ClusterStatus | None:
    async with RouterClient(router_address, credentials) as router:
        try:
            return await router.status()
        except WorkerLost:
            return None


# -- this machine -----------------------------------------------------------------------------------------------------


def check_models(config: ClusterConfig) -> Iterator[Finding]:
    from modelfiles.model import open_model

    for model in config.models:
        subject = f"model {model.name}"
        try:
            open_model(model.path)
        except ConfigError as error:
            yield Finding(
                subject=subject, verdict=Verdict.FAIL, message="its files cannot be used", remedy=error.message
            )
        else:
            yield Finding(subject=subject, verdict=Verdict.OK, message="its files are good")


def check_transfer(config: ClusterConfig) -> Iterator[Finding]:
    """Whether the backend that moves KV can be had here."""
    subject = f"transfer {config.transfer.backend}"
    if config.transfer.backend != "nixl":
        yield Finding(subject=subject, verdict=Verdict.OK, message="needs nothing of this machine")
        return
    from kvtransfer.backends.nixl import plugins

    try:
        names = plugins()
    except ServingError as error:
        yield Finding(subject=subject, verdict=Verdict.FAIL, message="cannot be loaded", remedy=error.message)
        return
    is_there = "UCX" in names
    yield Finding(
        subject=subject,
        verdict=Verdict.OK if is_there else Verdict.FAIL,
        message=f"plugins: {', '.join(names) or 'none'}",
        remedy="" if is_there else "the wheel has no UCX plugin: install nixl-cu12 or nixl-cu13 anew",
    )
    transports = ucx_transports()
    is_usable = not transports or "tcp" in transports.split(",") or transports.startswith("^")
    yield Finding(
        subject="UCX_TLS",
        verdict=Verdict.OK if is_usable else Verdict.FAIL,
        message=transports or "not set: UCX chooses",
        remedy="" if is_usable else "add tcp to UCX_TLS, or unset it: without it a dead peer is never noticed",
    )


def check_gpu(config: ClusterConfig, devices: Path = Path("/dev")) -> Finding:
    """Whether what pools ask for is there."""
    wanted = [
        f"{model.name}/{role}"
        for model in config.models
        for role, pool in model.pools.items()
        if pool.device.startswith("cuda") or pool.resources.num_gpus
    ]
    found = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    if wanted and not found:
        remedy = "install the driver, or set `device: cpu` and `resources: {num_gpus: 0}` for these pools"
        return Finding(
            subject="GPU", verdict=Verdict.FAIL, message=f"none, but {', '.join(wanted)} want one", remedy=remedy
        )
    return Finding(subject="GPU", verdict=Verdict.OK, message=", ".join(found) or "none, and none is asked for")


def check_clock() -> Finding:
    """Traces and logs of several machines are laid beside each other by their clocks. Nothing else needs them."""
    try:
        buffer = ctypes.create_string_buffer(256)  # struct timex; `status` is its fifth word
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
        is_synced = state >= 0 and not int.from_bytes(buffer.raw[40:44], "little") & _UNSYNCED
    except (OSError, AttributeError):
        return Finding(subject="clock", verdict=Verdict.OK, message="not known on this system")
    if is_synced:
        return Finding(subject="clock", verdict=Verdict.OK, message="kept by the network's time")
    return Finding(
        subject="clock",
        verdict=Verdict.WARN,
        message="kept by nobody",
        remedy="run chrony or systemd-timesyncd where several machines are traced; durations do not depend on it",
    )


def check_ports(config: ClusterConfig, router_address: str, *, is_running: bool) -> Iterator[Finding]:
    if is_running:
        yield Finding(subject=f"router {router_address}", verdict=Verdict.OK, message="answers")
    else:
        yield _free(f"router {router_address}", router_address, "no router answers there")
        yield _free(f"gateway {config.gateway.listen}", config.gateway.listen, "")


def _free(subject: str, address: str, found: str) -> Finding:
    """Of an address at which a cluster of this configuration would listen."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            remedy = "end the program that holds it (`ss -ltnp`), or choose another address"
            return Finding(
                subject=subject, verdict=Verdict.FAIL, message=f"cannot listen: {error.strerror}", remedy=remedy
            )
    message = f"{found}; the port is free" if found else "the port is free"
    return Finding(subject=subject, verdict=Verdict.WARN if found else Verdict.OK, message=message, remedy="`baton up`")


# -- the cluster ------------------------------------------------------------------------------------------------------


def check_workers(status: ClusterStatus) -> Iterator[Finding]:
    for pool in status.pools:
        subject = f"pool {pool.model}/{pool.role}"
        message = f"{pool.ready} of {pool.desired} ready"
        if pool.ready >= pool.desired:
            yield Finding(subject=subject, verdict=Verdict.OK, message=message)
        else:
            verdict = Verdict.WARN if pool.ready else Verdict.FAIL
            remedy = pool.problem or "look at the log of its launcher and of its workers"
            yield Finding(subject=subject, verdict=verdict, message=message, remedy=remedy)
    for worker in status.workers:
        if worker.state in (WorkerState.SUSPECT, WorkerState.LOST):
            yield Finding(
                subject=f"worker {worker.registration.worker_id}",
                verdict=Verdict.FAIL,
                message=f"{worker.state}, silent for {worker.heartbeat_age_s:.1f} s",
                remedy="look at its log; its launcher restarts it when its process has ended",
            )


async def check_pairs(config: ClusterConfig, status: ClusterStatus, credentials: Credentials | None) -> list[Finding]:
    """Each live pair is measured, one after the other: they share what they are measured on."""
    ready = [worker for worker in status.workers if worker.state is WorkerState.READY]
    pairs = [
        (p, d)
        for p in ready
        for d in ready
        if (p.registration.role, d.registration.role) == (Role.PREFILL, Role.DECODE)
        and p.registration.model.format_hash == d.registration.model.format_hash
    ]
    return [await _check_pair(config, p, d, credentials) for p, d in pairs]


async def _check_pair(
    config: ClusterConfig, prefill: WorkerStatus, decode: WorkerStatus, credentials: Credentials | None
) -> Finding:
    subject = f"pair {prefill.registration.worker_id} > {decode.registration.worker_id}"
    try:
        check = await ask_pair(prefill.registration, decode.registration, credentials)
    except ServingError as error:
        return Finding(subject=subject, verdict=Verdict.FAIL, message="cannot be measured", remedy=str(error))
    return judge_pair(subject, check, config.transfer.min_gb_per_s)


def judge_pair(subject: str, check: PairCheck, declared_gb_per_s: float) -> Finding:
    """By what was declared for every pair: `transfer.min_gb_per_s`."""
    used = next((link for link in check.links if link.is_used), None)
    if used is None:
        return Finding(subject=subject, verdict=Verdict.FAIL, message="no link is usable", remedy=check.reason)
    measured = used.bytes_per_s / 1e9
    message = f"{used.backend} by {used.lane or used.mode}: {measured:.2f} GB/s"
    if declared_gb_per_s and measured < declared_gb_per_s:
        return Finding(
            subject=subject,
            verdict=Verdict.FAIL,
            message=f"{message}, declared are {declared_gb_per_s:g}",
            remedy=f"see `baton doctor pair {check.prefill} {check.decode}`: {check.reason}",
        )
    if check.circuit != "closed":
        return Finding(
            subject=subject,
            verdict=Verdict.WARN,
            message=f"{message}; circuit {check.circuit}",
            remedy=check.circuit_why,
        )
    return Finding(subject=subject, verdict=Verdict.OK, message=message)
