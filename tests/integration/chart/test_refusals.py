"""Values that cannot be are refused by Helm itself, 3 and 4, with a message that names the key."""

import re

import pytest

from tests.support.chart import refusal

POOL = "models[0].pools.prefill"

UNKNOWN = [
    ("gatway.replicas=2", "gatway"),
    ("gateway.replica=2", "gateway", "replica"),
    (f'{POOL}.gpu="1"', POOL, "gpu"),
    (f"{POOL}.engine.tensorParallel=2", f"{POOL}.engine", "tensorParallel"),
    ("poolDefaults.lifecycle.drain=3", "poolDefaults.lifecycle", "drain"),
    ("models[0].pools.both={}", "models[0].pools", "both"),
    ("models[0].revision=1", "models[0]", "revision"),
    ("security.mtls.secrets.prefill='\"x\"'".replace("'", ""), "security.mtls.secrets", "prefill"),
    ('networkPolicy.allowGatewayFrom=[{"pods": {}}]', "networkPolicy.allowGatewayFrom[0]", "pods"),
    ("config.gateways={}", "config", "gateways"),
]
WRONG_TYPE = [
    ('gateway.replicas="two"', "gateway.replicas"),
    ("gateway.replicas=0", "gateway.replicas"),
    ("gateway.service.port=70000", "gateway.service.port"),
    (f"{POOL}.replicas=-1", f"{POOL}.replicas"),
    (f"{POOL}.replicas=1.5", f"{POOL}.replicas"),
    (f"{POOL}=3", POOL),
    ("models=[]", "models"),
    ("models[0].pools={}", "models[0].pools"),
    ('models[0]={"pools": {"unified": {}}}', "models[0]", "name"),
    ('placement.backend="nomad"', "placement.backend"),
    ('autoscaling.mode="both"', "autoscaling.mode"),
    ('transfer.backend="rdma"', "transfer.backend"),
    ("transfer.leaseSeconds=0", "transfer.leaseSeconds"),
    ('poolDefaults.shmSize="lots"', "poolDefaults.shmSize"),
    ('poolDefaults.accelerator.resource="gpu"', "poolDefaults.accelerator.resource"),
    ("poolDefaults.env.UCX_TLS=1", "poolDefaults.env.UCX_TLS"),
    ("poolDefaults.pdb.maxUnavailable=0", "poolDefaults.pdb.maxUnavailable"),
    ("poolDefaults.lifecycle.startupSeconds=1", "poolDefaults.lifecycle.startupSeconds"),
    ('poolDefaults.resources.limits.memory="much"', "poolDefaults.resources.limits.memory"),
    ('security.mtls.domain="-Baton"', "security.mtls.domain"),
    ('gateway.auth.limitsStore="memcached://x"', "gateway.auth.limitsStore"),
    ('observability.otlpEndpoint="collector:4317"', "observability.otlpEndpoint"),
    ('image.pullSecrets="x"', "image.pullSecrets"),
    ('ray.version="2"', "ray.version"),
]
IMPOSSIBLE = [
    ('models[0].pools={"prefill": {}}', "models[0].pools", "go together"),
    ('models[0].name="%"', "models[0].name", "no letter"),
    ('models[1]={"name": "SmolLM2_135m instruct", "pools": {"unified": {}}}', "models[1].name", "same names"),
    ("models[0].config.pools={}", "models[0].config.pools", "chart"),
    (f"{POOL}.replicas=0", "models[0].pools", "both 0, or neither"),
    ("poolDefaults.accelerator.count=1", "accelerator.resource", "of what"),
    ('poolDefaults.accelerator.resource="nvidia.com/gpu"', "accelerator.count", "how many"),
    ('poolDefaults.accelerator={"resource": "nvidia.com/gpu", "count": 1}', "engine.device is cpu"),
    ('poolDefaults.engine.device="cuda"', "engine.device", "needs an accelerator"),
    (
        'poolDefaults={"engine": {"device": "cuda"}, "accelerator": {"resource": "nvidia.com/mig-1g", "count": 2}}',
        "accelerator.count",
        "MIG slice",
    ),
    (
        'poolDefaults={"engine": {"device": "cuda"}, "accelerator": {"claimTemplate": "gpu", "count": 2}}',
        "accelerator",
        "claimTemplate",
    ),
    ("poolDefaults.rdma.count=1", "rdma.resource", "of what"),
    ('poolDefaults.rdma.resource="rdma/a"', "rdma.count", "how many"),
    ('poolDefaults.rdma={"resource": "rdma/a", "count": 1}', 'transfer.backend="tcp"', "rdma.resource", "say nixl"),
    (f'{POOL}.rollout={{"maxSurge": 0}}', f"{POOL}.rollout", "can ever be replaced"),
    (f'{POOL}.topologyKey="rack"', f"{POOL}.topologyKey", "nodes above 1"),
    (f'{POOL}.env.BATON__ROUTER__LISTEN="x"', f"{POOL}.env.BATON__ROUTER__LISTEN", "config"),
    ("gateway.auth.generate=false", "gateway.auth.existingSecret", "without keys"),
    ('gateway.auth.database="postgresql://u:p@h/d"', "gateway.auth.database", "holds a password"),
    ('gateway.auth.limitsStore="redis://:p@h/0"', "gateway.auth.limitsStore", "holds a password"),
    ('gateway.auth.databasePassword.secret="x"', "gateway.auth.databasePassword.secret", "which database"),
    ('gateway.auth.limitsPassword.secret="x"', "gateway.auth.limitsPassword.secret", "which store"),
    ("autoscaling.decode.min=9", "autoscaling.decode.min", "more than max"),
    ('autoscaling.mode="hpa"', 'placement.backend="ray"', "autoscaling.mode", "coupled"),
    ('autoscaling.mode="keda"', "autoscaling.keda.prometheus", "numbers"),
    ('autoscaling={"mode": "hpa", "hpa": {"target": "800m"}}', "autoscaling.hpa.target", "percentage"),
    ('autoscaling.mode="coupled"', f"{POOL}.replicas=9", "outside of autoscaling.prefill"),
    ('modelCache.existingClaim="x"', "modelCache.existingClaim", "modelCache.enabled"),
    ('modelCache={"enabled": true, "accessMode": "ReadWriteOnce"}', "modelCache.accessMode", "ReadWriteMany"),
    ('modelCache={"enabled": true, "accessMode": "ReadOnlyMany"}', "modelCache.accessMode", "prefetch"),
    ('modelCache.token.secret="x"', "modelCache.token.secret", "modelCache.enabled"),
    ("security.mtls.enabled=true", "security.mtls.secrets.worker", "worker.baton"),
    ("security.mtls.certManager.enabled=true", "security.mtls.certManager.enabled", "security.mtls.enabled"),
    (
        'security.mtls={"enabled": true, "certManager": {"enabled": true}}',
        "security.mtls.certManager.issuer",
        "who signs",
    ),
    ("gatewayApi.enabled=true", "gatewayApi.parentRefs", "Gateway"),
    ('ray.gcsFaultTolerance.passwordSecret="x"', "ray.gcsFaultTolerance.passwordSecret", "redis"),
    ('config.router.listen="0.0.0.0:1"', "config.router.listen", "key of the chart"),
    ('config.gateway.access.database="x"', "config.gateway.access", "key of the chart"),
    ("config.models=[]", "config.models", "key of the chart"),
    ('config.worker="x"', "config.worker"),
]
CASES = [tuple(case) for case in (*UNKNOWN, *WRONG_TYPE, *IMPOSSIBLE)]


def _is_setting(word: str) -> bool:
    return bool(re.match(r"[A-Za-z][\w.\[\]]*=", word))


def _forms(key: str) -> tuple[str, ...]:
    """One Helm writes models.0.pools, the other /models/0/pools."""
    dotted = key.replace("[", ".").replace("]", "")
    return key, dotted, "/" + dotted.replace(".", "/")


@pytest.mark.parametrize("major", ["3", "4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_it_is_refused_by_a_message_that_names_the_key(case: tuple[str, ...], major: str) -> None:
    settings = [word for word in case if _is_setting(word)]
    said = refusal(settings, major=major)
    for word in case:
        if not _is_setting(word):
            assert any(form in said for form in _forms(word)), said


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = refusal(["gateway.auth.generate=false", "gatewayApi.enabled=true"], major="4")
    assert "gateway.auth.existingSecret" in said and "gatewayApi.parentRefs" in said
