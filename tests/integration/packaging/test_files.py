"""Dockerfiles, the compose file, units of systemd and scripts: clean by their linters, and true about our programs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton.cli import parser
from core.config import load_config

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
COMPOSE = ROOT / "deploy" / "compose"


def _tool(name: str) -> str:
    """A program that rides in a package of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_clean_pinned_and_not_root(path: Path) -> None:
    _run(_tool("hadolint"), str(path))
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    [base] = [line.partition("=")[2] for line in lines if line.startswith("ARG BASE")]
    assert base.count(".") == 2 and not base.endswith("latest"), "a release, not a moving name"
    assert all("-c constraints.txt" in line for line in lines if "pip install" in line)


def test_scripts_are_clean() -> None:
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("deploy/**/*.sh")]
    _run(_tool("shellcheck"), *map(str, scripts))


def test_the_compose_file_runs_what_there_is() -> None:
    config = load_config(str(COMPOSE / "cluster.yaml"), environ={})
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    roles: list[str] = []
    for name, service in services.items():
        command = service.get("command")
        if command is None:
            continue
        assert command[0] == "baton" and service["read_only"] and service["user"] == "10001:10001"
        given = parser().parse_args(command[1:])
        if command[1] == "worker":
            assert given.worker_id == name and given.role in config.model(given.model).pools
            roles.append(given.role)
            grace_s = float(service["stop_grace_period"].removesuffix("s"))
            assert grace_s > config.worker.drain_s + config.transfer.lease_s
    assert sorted(roles) == ["decode", "decode", "prefill", "prefill"]
    assert config.router.address == "router:7000" and "router" in services
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]
    targets = [target.partition(":") for target in scraped["targets"]]
    assert {name for name, _, _ in targets} == {name for name in services if name not in ("prometheus", "ask")}
    assert {port for _, _, port in targets} == {str(config.worker.http_port)}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is(path: Path) -> None:
    lines = dict(line.partition("=")[::2] for line in path.read_text().splitlines() if "=" in line)
    words = lines["ExecStart"].split()
    assert words[0] == "/opt/baton/bin/baton"
    given = parser().parse_args(words[1:])
    assert given.config == "/etc/baton/cluster.yaml"
    assert lines["RestartPreventExitStatus"] == "2", "what a restart cannot mend"
    if words[1] == "worker":
        config = load_config(environ={})
        assert float(lines["TimeoutStopSec"]) > config.worker.drain_s + config.transfer.lease_s
        assert path.name == f"baton-{given.role}@.service"


def test_kind_gets_the_images_that_the_chart_asks_for() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "baton" / "values.yaml").read_text())
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "baton" / "Chart.yaml").read_text())
    script = (ROOT / "deploy" / "kind" / "up.sh").read_text()
    for image in (values["image"]["gateway"], values["image"]["worker"]):
        assert f"{image}:{chart['appVersion']}" in script
