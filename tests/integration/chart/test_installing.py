"""Real Helm and kubectl install, upgrade, test, roll back, scale and remove the chart on a stand-in of the API."""

import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.chart import CHART, RELEASE, render
from tests.support.kube_api import KubeApi
from tests.support.kube_tools import helm, kubectl

DECODE = f"{RELEASE}-baton-smollm2-135m-instruct-decode"
Run = Callable[..., str]


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with KubeApi() as served:
        yield served


@pytest.fixture
def run(api: KubeApi, tmp_path: Path) -> Run:
    """Runs a program against the API; its output."""
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    environment = {"KUBECONFIG": kubeconfig, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HELM_NAMESPACE": "llm"}

    def run(*command: str, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.processes
@pytest.mark.parametrize("major", ["3", "4"])
def test_a_release_lives_from_install_to_uninstall(api: KubeApi, run: Run, major: str) -> None:
    program = helm(major)
    values = ("-f", str(CHART / "values-kind.yaml"))
    wait = ("--wait", "--timeout", "60s") if major == "4" else ()
    said = run(program, "install", RELEASE, str(CHART), *values, *wait)
    assert "port-forward" in said and f"test {RELEASE}" in said
    decode = api.get("Deployment", DECODE)
    assert decode is not None and decode["spec"]["replicas"] == 2
    keys = api.get("Secret", f"{RELEASE}-baton-auth")
    assert keys is not None
    key = keys["data"]["api-key"]

    run(program, "test", RELEASE)
    assert api.get("Pod", f"{RELEASE}-baton-test") is not None

    run(program, "upgrade", RELEASE, str(CHART), *values, *wait, "--set", "models[0].pools.decode.replicas=3")
    decode = api.get("Deployment", DECODE)
    assert decode is not None and decode["spec"]["replicas"] == 3
    keys = api.get("Secret", f"{RELEASE}-baton-auth")
    assert keys is not None and keys["data"]["api-key"] == key, "an upgrade keeps the key that clients have"
    entry = yaml.safe_load(base64.b64decode(keys["data"]["keys.yaml"]))["keys"][0]
    assert entry["key"] == base64.b64decode(key).decode()

    run(program, "rollback", RELEASE, "1", *wait)
    decode = api.get("Deployment", DECODE)
    assert decode is not None and decode["spec"]["replicas"] == 2
    assert len(run(program, "history", RELEASE).splitlines()) == 4

    run(program, "uninstall", RELEASE)
    assert [one["kind"] for one in api.objects.values() if one["kind"] not in ("Namespace", "Pod")] == []


@pytest.mark.processes
def test_kubectl_applies_compares_and_scales(api: KubeApi, run: Run, tmp_path: Path) -> None:
    objects = [
        one for one in render("values-multinode.yaml") if "helm.sh/hook" not in one["metadata"].get("annotations", {})
    ]
    manifest = tmp_path / "all.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    run(kubectl(), "apply", "--server-side", "-f", str(manifest))
    assert {(one["kind"], one["metadata"]["name"]) for one in objects} <= {
        (one["kind"], one["metadata"]["name"]) for one in api.objects.values()
    }
    manifest.write_text(manifest.read_text().replace("replicas: 2", "replicas: 5"))
    changed = run(kubectl(), "diff", "--server-side", "-f", str(manifest), codes=(1,))
    assert "+  replicas: 5" in changed
    run(kubectl(), "scale", "--replicas=4", f"deployment/{RELEASE}-baton-gateway")
    gateway = api.get("Deployment", f"{RELEASE}-baton-gateway")
    assert gateway is not None and gateway["spec"]["replicas"] == 4
    objects[0] = {**objects[0], "spec": {**objects[0].get("spec", {}), "nonsense": True}}
    manifest.write_text(yaml.safe_dump(objects[0]))
    run(kubectl(), "apply", "--server-side", "-f", str(manifest), codes=(1,))
