"""From a configuration to components, and pools brought to their sizes."""

from __future__ import annotations

from core.config import ClusterConfig, parse_config
from core.types import Role
from deploy.cluster import Cluster, gateway_specs, router_spec, worker_spec
from deploy.launcher import ComponentKind, ComponentSpec


class Recorder:
    """A launcher that only writes down what it was asked."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.orders: list[str] = []

    async def start(self, spec: ComponentSpec) -> None:
        self.running.append(spec.name)
        self.orders.append(f"start {spec.name}")

    async def stop(self, name: str) -> None:
        self.running.remove(name)
        self.orders.append(f"stop {name}")


def cluster_of(config: ClusterConfig) -> tuple[Cluster, Recorder]:
    recorder = Recorder()
    return Cluster(config, recorder), recorder  # type: ignore[arg-type]


async def test_the_default_cluster_has_four_processes() -> None:
    cluster, recorder = cluster_of(ClusterConfig())
    assert await cluster.start() == ("router", "gateway", "prefill-0", "decode-0")
    assert recorder.running == ["router", "gateway", "prefill-0", "decode-0"]


async def test_several_gateways_have_names_of_their_own() -> None:
    cluster, recorder = cluster_of(parse_config({"gateway": {"processes": 2}}))
    assert await cluster.start() == ("router", "gateway-0", "gateway-1", "prefill-0", "decode-0")
    assert recorder.running[1:3] == ["gateway-0", "gateway-1"]
    specs = gateway_specs(parse_config({"gateway": {"processes": 2}}))
    assert [spec.argv[spec.argv.index("--gateway-id") + 1] for spec in specs] == ["gateway-0", "gateway-1"]


def test_a_worker_may_leave_and_nobody_else() -> None:
    config = ClusterConfig()
    assert worker_spec(config, config.models[0], Role.DECODE, 0).restart.may_leave
    assert not any(spec.restart.may_leave for spec in (router_spec(config), *gateway_specs(config)))


def test_workers_of_several_models_have_distinct_names() -> None:
    config = parse_config({"models": [{"name": "org/a"}, {"name": "b", "pools": {"unified": {}}}]})
    first, second = config.models
    assert worker_spec(config, first, Role.PREFILL, 0).name == "org-a.prefill-0"
    assert worker_spec(config, second, Role.UNIFIED, 1).name == "b.unified-1"


def test_a_worker_asks_for_its_pools_resources_and_the_others_for_none() -> None:
    config = parse_config({"models": [{"pools": {"unified": {"resources": {"num_cpus": 0.5, "num_gpus": 1}}}}]})
    worker = worker_spec(config, config.models[0], Role.UNIFIED, 0)
    assert worker.resources.as_bundle() == {"CPU": 0.5, "GPU": 1}
    assert router_spec(config).resources.as_bundle() == gateway_specs(config)[0].resources.as_bundle() == {}


def test_every_component_is_given_the_effective_configuration() -> None:
    config = parse_config({"router": {"listen": "127.0.0.1:7777"}, "gateway": {"limits": {"drain_s": 1}}})
    for spec in (router_spec(config), *gateway_specs(config), worker_spec(config, config.models[0], Role.DECODE, 0)):
        text = spec.argv[spec.argv.index("--config-json") + 1]
        assert ClusterConfig.model_validate_json(text) == config
    assert worker_spec(config, config.models[0], Role.DECODE, 0).kind is ComponentKind.WORKER


def test_a_gateway_ends_its_drain_before_it_would_be_killed() -> None:
    config = parse_config({"gateway": {"limits": {"drain_s": 100}}})
    [spec] = gateway_specs(config)
    given = ClusterConfig.model_validate_json(spec.argv[spec.argv.index("--config-json") + 1])
    assert given.gateway.limits.drain_s < spec.grace_s < config.launcher.stop_s
