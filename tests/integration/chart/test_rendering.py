"""What the chart makes of its values files, with both Helms: valid objects, a configuration that Baton takes, times
that add up, no secret in the open."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from core.config import load_config
from tests.support.chart import CHART, RELEASE, VALUES, Object, containers, find, pods, render
from tests.support.kube_models import is_known, problems, problems_of_added_kinds
from tests.support.kube_tools import helm

EVERYTHING = (
    'autoscaling.mode="hpa"',
    "gatewayApi.enabled=true",
    'gatewayApi.parentRefs=[{"name": "g"}]',
    "observability.serviceMonitor.enabled=true",
    "modelCache.enabled=true",
    "security.mtls.enabled=true",
    "security.mtls.certManager.enabled=true",
    'security.mtls.certManager.issuer="ca"',
    'models[1]={"name": "other model", "path": "/models/x", "pools": {"unified": {"env": {"UCX_TLS": "tcp"}}}}',
)
CASES = [(values, ()) for values in VALUES] + [("values.yaml", EVERYTHING)]
CASES += [(values, ('autoscaling.mode="coupled"',)) for values in ("values.yaml", "values-multinode.yaml")]


@pytest.mark.parametrize("major", ["3", "4"])
@pytest.mark.parametrize("values", VALUES)
def test_lint_finds_nothing(values: str, major: str) -> None:
    command = [helm(major), "lint", "--strict", str(CHART), "-f", str(CHART / values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_objects_are_valid_where_they_are_for(values: str, settings: tuple[str, ...]) -> None:
    objects = render(values, *settings)
    assert [problem for one in objects if is_known(one["kind"]) for problem in problems(one)] == []
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{,61}[a-z0-9])?", name) for _, name in names), names


def test_added_kinds_are_valid_by_their_models() -> None:
    objects = [one for values, settings in CASES for one in render(values, *settings)]
    assert {"ScaledObject", "ServiceMonitor", "HTTPRoute"} <= {one["kind"] for one in objects}
    assert problems_of_added_kinds(objects) == []
    broken = [
        {**one, "spec": {**one["spec"], "minReplicaCount": "x"}} for one in objects if one["kind"] == "ScaledObject"
    ]
    assert len(problems_of_added_kinds(broken)) == len(broken), "the models see a mistake"


@pytest.mark.parametrize("values", VALUES)
def test_both_helms_render_the_same(values: str) -> None:
    def stable(objects: tuple[Object, ...]) -> list[str]:
        return sorted(json.dumps(one, sort_keys=True) for one in objects if one["kind"] != "Secret")

    assert stable(render(values, major="3")) == stable(render(values, major="4"))


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_baton_takes_the_configuration(values: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    objects = render(values, *settings)
    path = tmp_path / "cluster.yaml"
    text = find(objects, "ConfigMap", RELEASE + "-baton")["data"]["cluster.yaml"]
    path.write_text(text.replace("device: cuda", "device: cpu"))  # what the device is does not matter here
    config = load_config(str(path), environ=_environment(objects, "router"))
    wanted = yaml.safe_load((CHART / values).read_text()).get("models") or [{"pools": {"prefill": {}, "decode": {}}}]
    for model, given in zip(config.models, wanted, strict=False):
        for role, pool in given["pools"].items():
            assert model.pools[role].replicas == pool.get("replicas", 1) * pool.get("nodes", 1)
    assert config.router.address.startswith(f"{RELEASE}-baton-router.")
    for name in ("gateway.listen", "gateway.http_listen", "router.listen"):
        section, key = name.split(".")
        assert getattr(getattr(config, section), key).startswith("0.0.0.0:")


def _environment(objects: tuple[Object, ...], component: str) -> dict[str, str]:
    [deployment] = [
        one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith(component)
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_a_pod_is_given_the_time_that_its_drain_may_take(values: str, settings: tuple[str, ...]) -> None:
    objects = render(values, *settings)
    config = yaml.safe_load(find(objects, "ConfigMap", RELEASE + "-baton")["data"]["cluster.yaml"])
    num_workers = 0
    for name, template in pods(objects):
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        if name.endswith("gateway"):
            limits = config["gateway"]["limits"]
            assert grace > limits["drain_wait_s"] + limits["drain_s"]
        elif "baton.dev/worker" in template["metadata"].get("labels", {}):
            num_workers += 1
            [container] = template["spec"]["containers"]
            drain_s = next(float(one["value"]) for one in container["env"] if one["name"] == "BATON__WORKER__DRAIN_S")
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert grace > pause + drain_s + config["transfer"]["lease_s"]
    assert num_workers


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_pods_run_as_nobody_with_a_root_that_is_not_written(values: str, settings: tuple[str, ...]) -> None:
    for name, template in pods(render(values, *settings)):
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"]["type"] == "RuntimeDefault", name
        may_ask_kubernetes = name.endswith(("-placer", "-ray/head"))
        assert template["spec"].get("automountServiceAccountToken") is False or may_ask_kubernetes, name
        for container in containers(template):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert set(security["capabilities"].get("add", ())) <= {"IPC_LOCK"}, name
            assert container["resources"]["requests"] and "memory" in container["resources"]["limits"], name
            mounts = {one["mountPath"] for one in container["volumeMounts"]}
            assert "/tmp" in mounts, "a place to write"
            volumes = {one["name"] for one in template["spec"]["volumes"]}
            assert {one["name"] for one in container["volumeMounts"]} <= volumes, name


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_every_server_has_its_three_probes(values: str, settings: tuple[str, ...]) -> None:
    for name, template in pods(render(values, *settings)):
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        [container] = template["spec"]["containers"]
        if component in ("prefetch", "test", "placer"):
            continue
        is_ray = "RayCluster" in name
        for probe in ("readinessProbe", "livenessProbe", *(() if is_ray else ("startupProbe",))):
            asked = container[probe]
            assert asked["timeoutSeconds"] >= 5 and "exec" not in asked, name
            if not is_ray:
                assert asked["httpGet"]["port"] == "http"
                assert asked["httpGet"]["path"] == ("/ready" if probe == "readinessProbe" else "/health")


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_no_secret_stands_in_the_open(values: str, settings: tuple[str, ...]) -> None:
    objects = render(values, *settings)
    secret = re.compile(r"password|token|secret|api.?key|admin.?key|credential", re.IGNORECASE)
    for name, template in pods(objects):
        for container in containers(template):
            for one in container.get("env", ()):
                is_secret = (
                    secret.search(one["name"]) and not one["name"].endswith("_PATH") and one["name"] != "RAY_AUTH_MODE"
                )
                assert not is_secret and "secretKeyRef" not in one.get("valueFrom", {}), f"{name}: {one['name']}"
                assert "sk-baton-" not in str(one), name
            words = " ".join([*container.get("command", ()), *container.get("args", ())])
            assert "sk-baton-" not in words and not re.search(r"(password|token|key)=", words), name
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, name
    for one in objects:
        if one["kind"] != "Secret":
            assert "sk-baton-" not in json.dumps(one)


def test_who_sizes_the_pools_is_one() -> None:
    for mode in ("off", "observe", "hpa", "keda", "coupled"):
        settings = [f'autoscaling.mode="{mode}"', 'autoscaling.keda.prometheus="http://prometheus:9090"']
        objects = render("values.yaml", *settings)
        config = yaml.safe_load(find(objects, "ConfigMap", RELEASE + "-baton")["data"]["cluster.yaml"])
        kinds = [one["kind"] for one in objects]
        workers = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("code")]
        assert len(workers) == 1
        assert ("replicas" in workers[0]["spec"]) == (mode in ("off", "observe"))
        assert kinds.count("HorizontalPodAutoscaler") == (2 if mode == "hpa" else 0)
        assert kinds.count("ScaledObject") == (2 if mode == "keda" else 0)
        assert (config["models"][0]["autoscale"]["mode"] == "act") == (mode == "coupled")
        assert any(one["metadata"]["name"].endswith("-placer") for one in objects) == (mode == "coupled")


def test_a_resized_pool_restarts_no_other_process() -> None:
    def templates(replicas: int) -> dict[str, str]:
        settings = f"models[0].pools.decode.replicas={replicas}"
        return {name: json.dumps(template) for name, template in pods(render("values.yaml", settings))}

    two, three = templates(2), templates(3)
    assert {name for name in two if two[name] != three[name]} == {f"Deployment/{RELEASE}-baton-router"}


def test_groups_of_pods_go_to_one_domain_together() -> None:
    objects = render("values-multinode.yaml")
    group = find(objects, "LeaderWorkerSet", "-decode")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 4 and group["spec"]["replicas"] == 2
    annotations = group["metadata"]["annotations"]
    assert annotations["leaderworkerset.sigs.k8s.io/exclusive-topology"] == "topology.example.org/rack"


def test_copies_of_dashboards_and_rules_are_copies() -> None:
    """Their one source is deploy/observability."""
    root = CHART.parents[1] / "observability"
    for source, copies in (("grafana/*.json", "dashboards"), ("prometheus/rules.yaml", "rules")):
        originals = {path.name: path.read_text() for path in root.glob(source)}
        copied = {path.name: path.read_text() for path in (CHART / "files" / copies).iterdir()}
        assert originals and copied == originals, "run `make chart`"
