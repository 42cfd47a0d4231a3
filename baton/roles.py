"""What makes a worker a prefill or a decode worker; a unified one is a decode worker that takes no hand-offs."""

from core.types import Role
from decode_worker.service import DecodeRole
from prefill_worker.service import PrefillRole
from worker.context import WorkerContext, WorkerRole
from worker.process import TransferMemory


def make_role(context: WorkerContext, memory: TransferMemory) -> WorkerRole:
    """For :class:`worker.process.Worker`; a process that is flipped asks again."""
    if context.role is Role.PREFILL:
        return PrefillRole(context, memory.leases, memory.me)
    return DecodeRole(context, memory.transfers, memory.me)
