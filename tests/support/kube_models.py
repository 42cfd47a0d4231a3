"""Objects against the schemas of what they are for: Kubernetes in several versions, and the kinds that others add."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSIONS = ("1.33.0", "1.35.0", "1.37.0")
CRDS = Path(__file__).parents[1] / "data" / "crds"
FILES = {"RayCluster": "ray.io_raycluster.json", "LeaderWorkerSet": "leaderworkerset.json"}
PACKAGES = (
    "@kubernetes-models/keda@0.4.2",
    "@kubernetes-models/prometheus-operator@6.0.0",
    "@kubernetes-models/gateway-api@0.5.1",
)
MODULES = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
}
SCRIPT = """
const fs = require("fs");
(async () => {
  for (const [module, object] of JSON.parse(fs.readFileSync(0)))
    try { new (await import(module))[object.kind](object).validate(); console.log("ok"); }
    catch (error) { console.log(error.message.replace(/\\s+/g, " ")); }
})();
"""


def problems(one: Any) -> Iterator[str]:
    """What is wrong with an object of Kubernetes itself, a RayCluster or a LeaderWorkerSet."""
    kind = one["kind"]
    if kind in FILES:
        for error in _crd(kind).iter_errors(one):
            yield f"{kind}: {error.message} at {'.'.join(map(str, error.path))}"
        return
    for version in VERSIONS:
        for error in _kubernetes(version, kind, one["apiVersion"]).iter_errors(one):
            yield f"{kind} {version}: {error.message} at {'.'.join(map(str, error.path))}"


def is_known(kind: str) -> bool:
    return kind not in MODULES and kind != "Certificate"


def problems_of_added_kinds(objects: Sequence[Any]) -> list[str]:
    """Of KEDA's, Prometheus's and the Gateway API's: their published models say, run by Node."""
    asked = [(MODULES[one["kind"]], one) for one in objects if one["kind"] in MODULES]
    if not asked:
        return []
    command = [str(shutil.which("node")), "-e", SCRIPT]
    done = subprocess.run(
        command, cwd=_models(), input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=True
    )
    answers = done.stdout.splitlines()
    assert len(answers) == len(asked), done.stderr
    return [f"{one['kind']}: {answer}" for (_, one), answer in zip(asked, answers, strict=True) if answer != "ok"]


@cache
def _kubernetes(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """As `kubernetes-validate --strict` reads its schemas, which for each object reads all of them anew."""
    group, _, name = api_version.rpartition("/")
    path = f"{kind.lower()}-{group.partition('.')[0]}-{name}.json".replace("--", "-")
    schema = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{path}", version)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    path = f"kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    return Resource.from_contents(schema_contents(path, version)) @ Registry()


@cache
def _crd(kind: str) -> jsonschema.Draft202012Validator:
    versions = json.loads((CRDS / FILES[kind]).read_text())["versions"]
    return jsonschema.Draft202012Validator(_closed(versions["v1"]))


def _closed(schema: Any) -> Any:
    """The API server prunes what a schema does not name; here that is a mistake."""
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items() if name != "properties"}
    if "properties" in schema:
        closed["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not is_open:
            closed["additionalProperties"] = False
    return closed


@cache
def _models() -> Path:
    """The folder in which npm has put the models. Skips the test where there is no Node or they cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node and npm are not installed")
    target = Path(tempfile.gettempdir()) / f"baton-test-tools-{os.getuid()}" / "kubernetes-models"
    if not (target / "done").exists():
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(target), *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode != 0:
            pytest.skip(f"npm cannot get the models: {done.stderr[-300:]}")
        (target / "done").touch()
    return target
