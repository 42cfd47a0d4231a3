"""Every kernel for a GPU becomes machine code, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_compile_and_keep_their_values_in_registers(target: str, tmp_path: Path) -> None:
    report = tmp_path / "kernels.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.gpu.ahead", "--target", target, "--brief", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert len({row["kernel"] for row in rows}) == 12, "a new kernel wants a variant here"
    assert not [row["name"] for row in rows if row["spilled_bytes"]]
    limit = 227 * 1024 if target == "sm_90" else 163 * 1024
    assert not [row["name"] for row in rows if row["shared_bytes"] > limit]


def test_interpreted_kernels_are_not_compiled() -> None:
    command = [sys.executable, "-m", "engine.kernels.gpu.ahead"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "run without it" in done.stderr
