"""The NetworkPolicies allow what the cell needs, and nothing else: every pair of pods, both ways, every port."""

import itertools

import pytest

from tests.support.chart import NAMESPACE, Object, containers, pods, render
from tests.support.network_policies import Endpoint, may_reach

API, ROUTER, WORKER, HTTP, DATA = 8000, 7000, 7100, 9090, 40123
PORTS = (API, ROUTER, WORKER, HTTP, DATA, 22)
TWO_MODELS = 'models[1]={"name": "b", "path": "x", "pools": {"prefill": {}, "decode": {}}}'
PROMETHEUS = 'networkPolicy.allowPrometheusFrom=[{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]'
INGRESS = 'networkPolicy.allowGatewayFrom=[{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]'
CACHE = "modelCache.enabled=true"

DNS = Endpoint(name="dns", namespace="kube-system", namespace_labels={"name": "kube-system"})
OUTSIDE = Endpoint(name="outside", address="203.0.113.9")
SCRAPER = Endpoint(name="prometheus", namespace="monitoring", namespace_labels={"name": "monitoring"})
FRONT = Endpoint(name="front", namespace="ingress", namespace_labels={"name": "ingress"})
STRANGER = Endpoint(name="stranger", namespace=NAMESPACE, labels={"app": "else"})
OTHER_CELL = Endpoint(
    name="other cell",
    namespace=NAMESPACE,
    labels={
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": "another",
        "app.kubernetes.io/component": "gateway",
        "baton.dev/worker": "true",
    },
)


def _endpoints(objects: tuple[Object, ...]) -> dict[str, Endpoint]:
    """By component, with the model's letter for pools."""
    found = {}
    for _, template in pods(objects):
        labels = template["metadata"]["labels"]
        model = labels.get("baton.dev/model", "")
        name = labels["app.kubernetes.io/component"] + (f" {'b' if model == 'b' else 'a'}" if model else "")
        found[name] = Endpoint(name=name, namespace=NAMESPACE, labels=labels)
    return found


def _reach(
    objects: tuple[Object, ...], ends: list[Endpoint], ports: tuple[int, ...] = PORTS
) -> set[tuple[str, str, int]]:
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    return {
        (source.name, target.name, port)
        for source, target in itertools.permutations(ends, 2)
        for port in ports
        if not (source.address and target.address) and may_reach(policies, source, target, port)
    }


def test_exactly_what_a_cell_needs_can_be_reached() -> None:
    objects = render("values.yaml", TWO_MODELS, PROMETHEUS, INGRESS, CACHE)
    inside = _endpoints(objects)
    assert set(inside) == {"gateway", "router", "prefill a", "decode a", "prefill b", "decode b", "test", "prefetch"}
    strangers = [STRANGER, OTHER_CELL, SCRAPER, FRONT]
    workers = [f"{role} {model}" for role in ("prefill", "decode") for model in "ab"]
    wanted = {("front", "gateway", API), ("test", "gateway", API), ("gateway", "router", ROUTER)}
    wanted |= {("gateway", worker, WORKER) for worker in workers} | {(worker, "router", ROUTER) for worker in workers}
    for model, port in itertools.product("ab", PORTS):
        wanted |= {(f"prefill {model}", f"decode {model}", port), (f"decode {model}", f"prefill {model}", port)}
    wanted |= {("prometheus", name, HTTP) for name in ("gateway", "router", *workers)}
    reached = _reach(objects, [*inside.values(), *strangers])
    among_strangers = {end.name for end in strangers}
    assert {one for one in reached if not {one[0], one[1]} <= among_strangers} == wanted


def test_only_the_fetch_of_models_leaves_the_cluster() -> None:
    objects = render("values.yaml", CACHE)
    reached = _reach(objects, [*_endpoints(objects).values(), OUTSIDE], (443, 80, API, ROUTER, WORKER, HTTP))
    assert {one for one in reached if "outside" in one} == {("prefetch", "outside", 443)}


def test_names_can_be_resolved_by_all() -> None:
    objects = render("values.yaml", CACHE)
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    for end in _endpoints(objects).values():
        assert may_reach(policies, end, DNS, 53, "UDP") and may_reach(policies, end, DNS, 53)
        assert not may_reach(policies, end, DNS, 5353, "UDP")


@pytest.mark.parametrize("mode", ["off", "coupled"])
def test_the_placer_reaches_the_router_and_the_api_of_kubernetes(mode: str) -> None:
    objects = render(
        "values.yaml",
        f'autoscaling.mode="{mode}"',
        'networkPolicy.allowApiServer=[{"ipBlock": {"cidr": "203.0.113.0/24"}}]',
    )
    placer = {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": "cell",
        "app.kubernetes.io/component": "placer",
    }
    inside = _endpoints(objects) | {"placer": Endpoint(name="placer", namespace=NAMESPACE, labels=placer)}
    reached = _reach(objects, [*inside.values(), OUTSIDE], (443, ROUTER, WORKER, API))
    wanted = {("placer", "router", ROUTER), ("placer", "outside", 443)} if mode == "coupled" else set()
    assert {one for one in reached if "placer" in one} == wanted


def test_ray_is_reached_by_its_own_and_by_nobody_else() -> None:
    objects = render("values-ray.yaml")
    inside = _endpoints(objects)
    reached = _reach(objects, [*inside.values(), STRANGER, OTHER_CELL], (6379, WORKER))
    reached = {one for one in reached if one[0] in inside or one[1] in inside}
    of_ray = {"ray-head", "placer", "prefill a", "decode a"}
    assert {one for one in reached if one[2] == 6379} == {(a, b, 6379) for a, b in itertools.permutations(of_ray, 2)}
    assert {one for one in reached if one[2] == WORKER and one[0] not in of_ray} == {
        ("gateway", worker, WORKER) for worker in ("prefill a", "decode a")
    }


def test_what_a_process_listens_on_is_what_the_policies_speak_of() -> None:
    listens = {}
    for _, template in pods(render("values.yaml")):
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        [container] = containers(template)
        listens[component] = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    assert listens["gateway"] == {"api": API, "http": HTTP} and listens["router"] == {"grpc": ROUTER, "http": HTTP}
    assert listens["prefill"] == listens["decode"] == {"grpc": WORKER, "http": HTTP}


def test_without_policies_there_are_none() -> None:
    assert not [one for one in render("values.yaml", "networkPolicy.enabled=false") if one["kind"] == "NetworkPolicy"]
