"""Rules, runbooks and dashboards belong together, and are what their sources say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from deploy.dashboards import DASHBOARDS, FOLDER, to_json, write
from tests.support.prometheus import OBSERVABILITY, RULES, program

TESTS = RULES.with_name("rules_test.yaml")


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_every_alert_has_a_runbook_of_its_name_and_every_runbook_an_alert() -> None:
    runbooks = {path.stem for path in (OBSERVABILITY / "runbooks").glob("*.md")}
    assert runbooks == alerts().keys()
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"runbooks/{name}.md"
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("page", "ticket")
        text = (OBSERVABILITY / "runbooks" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert "## Look" in text and "## Do" in text
        for link in re.findall(r"\]\(([\w.]+)\)", text):
            assert (OBSERVABILITY / "runbooks" / link).is_file(), link


def test_every_alert_fires_in_a_unit_test() -> None:
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == alerts().keys()
    done = subprocess.run(
        [program("promtool"), "test", "rules", TESTS.name],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_the_example_of_a_configuration_are_what_prometheus_and_alertmanager_read() -> None:
    promtool, amtool = program("promtool"), program("amtool")
    for command in (
        [promtool, "check", "rules", "--lint-fatal", str(RULES)],
        [promtool, "check", "config", str(RULES.with_name("prometheus.yaml"))],
        [amtool, "check-config", str(OBSERVABILITY / "alertmanager.yaml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_what_their_tables_say(tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert kept == written, "run `python -m deploy.dashboards` and commit the result"
    assert len(DASHBOARDS) == 5


def test_panels_lie_beside_each_other_and_ids_are_told_once() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS)
    for dashboard in DASHBOARDS:
        panels: Any = to_json(dashboard)["panels"]
        json.dumps(panels)
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (x, y)
            for panel in panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert all(0 <= x < 24 for x, _ in cells)
        titles = [panel.title for panel in dashboard.panels]
        assert len(set(titles)) == len(titles)


def test_the_collector_has_what_its_pipelines_name() -> None:
    config = yaml.safe_load((OBSERVABILITY / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= config[kind].keys()
    assert set(config["service"]["extensions"]) <= config["extensions"].keys()
