"""Process entry of a prefill worker."""

from collections.abc import Callable, Mapping

from core.config import ClusterConfig, ModelConfigSection
from core.types import Role
from prefill_worker.service import PrefillRole
from worker.process import run_worker


async def run(
    config: ClusterConfig,
    model: ModelConfigSection,
    *,
    worker_id: str,
    announce: Callable[[Mapping[str, str]], None],
) -> None:
    """Serve until told to stop. Raises ConfigError, or WorkerLost when the worker broke and should be restarted."""
    await run_worker(
        config,
        model,
        Role.PREFILL,
        worker_id=worker_id,
        announce=announce,
        make_role=lambda context, memory: PrefillRole(context, memory.leases, memory.me),
    )
