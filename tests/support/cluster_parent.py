"""Starts components on a launcher and waits to be killed: ``cluster_parent process|ray RUN_DIR``.

Prints ``up`` and the pids of the components once they are ready.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from deploy.launcher import ComponentKind, ComponentSpec, ComponentState, Launcher
from deploy.process import ProcessLauncher
from deploy.ray_launcher import RayLauncher

COMPONENT = str(Path(__file__).with_name("component.py"))


async def main(kind: str, run_dir: Path) -> None:
    launcher: Launcher = ProcessLauncher() if kind == "process" else RayLauncher(run_dir=run_dir)
    print("opening", flush=True)
    async with launcher:
        for name in ("a", "b"):
            argv = (sys.executable, "-S", COMPONENT, "steady")
            await launcher.start(ComponentSpec(name=name, kind=ComponentKind.WORKER, argv=argv))
        pids = []
        async for event in launcher.events():
            if event.state is ComponentState.READY:
                pids.append(event.pid)
            if len(pids) == 2:
                print("up", *pids, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
