"""The chart as Helm renders it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.kube_tools import helm

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
RELEASE, NAMESPACE = "cell", "llm"
VALUES = ("values.yaml", *sorted(path.name for path in CHART.glob("values-*.yaml")))

Object = Mapping[str, Any]


@cache
def render(values: str = "values.yaml", *settings: str, major: str = "4") -> tuple[Object, ...]:
    """All objects, hooks too."""
    done = template(values, settings, major=major)
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one is not None)


def refusal(settings: Sequence[str], *, values: str = "values.yaml", major: str) -> str:
    """What Helm says of values that it does not take."""
    done = template(values, settings, major=major)
    assert done.returncode != 0, f"rendered with {settings}"
    return done.stderr


def template(values: str, settings: Sequence[str], *, major: str) -> subprocess.CompletedProcess[str]:
    given = [argument for one in settings for argument in ("--set-json", one)]
    command = [
        helm(major),
        "template",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "-f",
        str(CHART / values),
        *given,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def find(objects: Sequence[Object], kind: str, suffix: str = "") -> Object:
    """The one object of a kind whose name ends like that."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, [one["metadata"]["name"] for one in objects if one["kind"] == kind]
    return found[0]


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """(whose, pod template) of everything that makes pods."""
    for one in objects:
        name, spec = f"{one['kind']}/{one['metadata']['name']}", one.get("spec", {})
        match one["kind"]:
            case "Pod":
                yield name, one
            case "Deployment" | "Job":
                yield name, spec["template"]
            case "LeaderWorkerSet":
                yield name, spec["leaderWorkerTemplate"]["workerTemplate"]
            case "RayCluster":
                yield f"{name}/head", spec["headGroupSpec"]["template"]
                for group in spec["workerGroupSpecs"]:
                    yield f"{name}/{group['groupName']}", group["template"]
            case _:
                pass


def containers(template: Object) -> Iterator[Object]:
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]
