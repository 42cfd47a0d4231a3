"""Process entry of a decode worker, and of a unified one."""

from collections.abc import Callable, Mapping

from core.config import ClusterConfig, ModelConfigSection
from core.types import Role
from decode_worker.service import DecodeRole
from worker.process import run_worker


async def run(
    config: ClusterConfig,
    model: ModelConfigSection,
    role: Role,
    *,
    worker_id: str,
    announce: Callable[[Mapping[str, str]], None],
) -> None:
    """Serve until told to stop. Raises ConfigError, or WorkerLost when the worker broke and should be restarted."""
    await run_worker(
        config,
        model,
        role,
        worker_id=worker_id,
        announce=announce,
        make_role=lambda context, memory: DecodeRole(context, memory.transfers, memory.me),
    )
