"""What every test run shares: settings that must be in place before torch or Triton is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# The suite shares its cores with the worker processes it starts, and one thread gives one order of summation.
os.environ["OMP_NUM_THREADS"] = "1"
# Triton reads this when a kernel is decorated, so it must be set before kernels are imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Nothing under test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Wall time on shared cores says nothing about the code, so examples have no deadline; and one commit draws the same
# examples everywhere.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


IN_VIRTUAL_TIME = ("test_inject.py", "test_defences.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that start clusters of processes say so; in ``faults`` all do but those named."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "faults" and item.path.name not in IN_VIRTUAL_TIME:
            item.add_marker("processes")
