"""The progress thread of an idle NIXL agent leaves the core to the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

IDLE_AGENT = """
import resource, time
from core.ids import WorkerId, new_incarnation
from kvtransfer.backends.base import Identity
from kvtransfer.backends.nixl import NixlBackend

backend = NixlBackend()
backend.open(Identity(worker_id=WorkerId("idle"), incarnation=new_incarnation()), ())
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(0.5)
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 0.5)
"""


def test_an_idle_agent_needs_almost_no_cpu() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", IDLE_AGENT], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert float(result.stdout.split()[-1]) < 0.1, "a spinning thread takes a third of a core even on a busy machine"
