"""A real Prometheus scrapes a running cluster: every query has an answer, and faults come to the webhook as alerts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from deploy.dashboards import DASHBOARDS
from tests.support.cluster import ProcessCluster
from tests.support.prometheus import RULES, Monitoring, Webhook, program
from tests.support.tiny_cluster import ask, questions, tiny_settings

pytestmark = pytest.mark.processes

NUM_REQUESTS = 3


def dashboard_queries() -> list[str]:
    queries = [expression for one in DASHBOARDS for panel in one.panels for _, expression in panel.queries]
    return [query.replace("$__rate_interval", "1m") for query in queries]


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


async def test_every_query_has_an_answer_and_two_faults_come_to_the_webhook(tmp_path: Path) -> None:
    program("prometheus"), program("prometheus-alertmanager")
    fault = tmp_path / "one-bad-read"
    settings = (*tiny_settings(tmp_path), f"failpoints={{decode.fetched: 'when:{fault}:error:digest_mismatch'}}")
    async with ProcessCluster(tmp_path, *settings) as cluster, Webhook() as webhook:
        status = await cluster.status()
        targets = {
            "baton-gateway": [cluster.config.gateway.listen],
            "baton-router": [status.router_http_address],
            "baton-worker": [worker.registration.http_address for worker in status.workers],
        }
        asked = questions(seed=5, count=NUM_REQUESTS, longest=300, num_tokens=8)
        await ask(cluster, asked[0])
        async with Monitoring(tmp_path / "monitoring", targets, webhook) as monitoring:
            silent = dashboard_queries()

            async def all_have_data() -> bool:
                """Rates need two scrapes with work in between, and the rules an evaluation after them."""
                nonlocal silent
                await asyncio.gather(*[ask(cluster, question) for question in asked])
                await asyncio.sleep(1)  # the time between two scrapes
                silent = [query for query in silent if not await monitoring.query(query)]
                return not silent

            await monitoring.until(lambda: f"these queries have data: {silent}", all_have_data)
            assert await monitoring.query("sum(rate(baton_gateway_generation_tokens_total[1m])) > 0")
            for rule in rules():
                await monitoring.query(rule["expr"])  # an alert that does not fire is empty, but it must be a query
                if "record" in rule:
                    assert await monitoring.query(rule["record"]), rule["record"]
            await the_metrics_of_alerts_exist(monitoring)

            for question in asked[:2]:
                fault.touch()
                await ask(cluster, question)  # answered all the same
                assert not fault.exists()
            await monitoring.until(
                lambda: "transfer failures are told", lambda: "BatonKvTransferFailures" in webhook.names()
            )
            assert "BatonNoReadyWorkers" not in webhook.names()
            cluster.kill("decode-0")
            await monitoring.until(lambda: "no decode worker is told", lambda: "BatonNoReadyWorkers" in webhook.names())
            told = next(alert for alert in webhook.alerts if alert["labels"]["alertname"] == "BatonNoReadyWorkers")
            assert told["labels"]["role"] == "decode"
            assert told["labels"]["severity"] == "page"
            assert told["annotations"]["runbook"] == "runbooks/BatonNoReadyWorkers.md"


async def the_metrics_of_alerts_exist(monitoring: Monitoring) -> None:
    """No alert waits for a series that no process has: each is scraped now, or known by name where it only exists once
    something has happened."""
    known = {one["metric"]["__name__"] for one in await monitoring.query('{__name__=~"baton_.+"}')}
    known |= await monitoring.described()
    for rule in rules():
        for name in set(re.findall(r"\bbaton_\w+", rule["expr"])):
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert {name, family, f"{family}_total"} & known, f"{rule.get('alert')}: no process has {name}"
