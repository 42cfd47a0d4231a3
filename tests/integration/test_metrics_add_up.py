"""What metrics say is what was done: a hand count after a scripted run, and nothing is left when there is no work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from core.config import load_config
from core.telemetry import Telemetry, metrics_type
from engine.engine import Engine
from gateway.metrics import GatewayMetrics
from kvtransfer.backends.nixl import NixlBackend
from tests.support.local_cluster import MODEL, LocalCluster

pytestmark = pytest.mark.timeout(180)
COMPONENTS = ("gateway", "router", "prefill-0", "decode-0")
FACTS = {"kind": {"free", "cached"}}
"""Gauges that are not zero without work: what is there, not what is done."""
NO_WORK = (
    "baton_mock_execution",
    "baton_kv_cache_capacity_bytes",
    "baton_kv_prefault_bytes",
    "baton_kv_pair_",
    "baton_router_pool_size",
    "baton_router_workers",
    "baton_router_gateways",
    "baton_router_prefix_blocks",
    "baton_router_autoscaler_workers",
)


class Scrape:
    """All samples of a cluster by component, as its ports would tell them."""

    def __init__(self, cluster: LocalCluster, telemetries: dict[str, Telemetry]) -> None:
        texts = {name: telemetries[name].render_metrics().decode() for name in ("gateway", "router")}
        texts |= {name: worker._render_metrics().decode() for name, worker in cluster.workers.items()}
        self.families = {name: list(text_string_to_metric_families(text)) for name, text in texts.items()}

    def value(self, component: str, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; there is one."""
        found = [
            sample.value
            for family in self.families[component]
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{component} has no {name} with {labels}"
        return sum(found)

    def busy(self) -> dict[str, float]:
        """Gauges of work that are not zero."""
        return {
            f"{component} {sample.name} {sample.labels}": sample.value
            for component, families in self.families.items()
            for family in families
            if family.type == "gauge" and not family.name.startswith(NO_WORK) and not family.name.endswith("_created")
            for sample in family.samples
            if sample.value and sample.labels.get("kind") not in FACTS["kind"]
        }


@contextmanager
def _telemetries() -> Iterator[dict[str, Telemetry]]:
    yield {name: Telemetry(component=name) for name in COMPONENTS}


async def _idle(cluster: LocalCluster, telemetries: dict[str, Telemetry]) -> Scrape:
    """Once there is no work, and everybody who is told of its end has been told."""
    until = time.monotonic() + 60
    while True:
        scrape = Scrape(cluster, telemetries)
        at_work = [name for name, worker in cluster.workers.items() if not worker.role.is_idle()]
        if not scrape.busy() and not at_work:
            return scrape
        assert time.monotonic() < until, f"not idle: {scrape.busy()}, {at_work}"
        await asyncio.sleep(0.02)


async def test_metrics_equal_a_hand_count(engines: dict[str, Engine]) -> None:
    with _telemetries() as telemetries:
        cluster = LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=telemetries)
        async with cluster:
            block_bytes = engines["decode-0"].geometry.block_bytes
            before = Scrape(cluster, telemetries)
            lengths, answers = (5, 16, 40, 70), (3, 1, 6, 2)
            for number, (length, max_tokens) in enumerate(zip(lengths, answers, strict=True)):
                prompt = [1000 * number + 100 + place for place in range(length)]
                answer = await cluster.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == max_tokens
            assert (await cluster.http.post("/v1/completions", json={"model": "no", "prompt": "x"})).status_code == 404

            def cancelled() -> float:
                scrape = Scrape(cluster, telemetries)
                return scrape.value("decode-0", "baton_attempts_ended_total", outcome="cancelled")

            num_cancelled = cancelled()
            hold = cluster.workers["decode-0"].context.failpoints
            hold.set("decode.granted", "pause:60")
            asking = asyncio.create_task(cluster.complete([9000 + place for place in range(20)], max_tokens=4))
            async with asyncio.timeout(60):
                while not hold.num_hits("decode.granted"):
                    await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(60):  # D knows of the end before it may go on
                while cancelled() == num_cancelled:
                    await asyncio.sleep(0.005)
            hold.set("decode.granted", "")
            after = await _idle(cluster, telemetries)

    def made(component: str, name: str, **labels: str) -> float:
        return after.value(component, name, **labels) - before.value(component, name, **labels)

    num_answered = len(lengths)
    assert made("gateway", "baton_gateway_requests_total", outcome="length") == num_answered
    assert made("gateway", "baton_gateway_requests_total", outcome="cancelled") == 1
    assert made("gateway", "baton_gateway_requests_total") == num_answered + 1
    assert made("gateway", "baton_gateway_aborts_total", cause="client") == 1
    assert made("gateway", "baton_gateway_attempts_total") == num_answered + 1
    assert made("gateway", "baton_gateway_prompt_tokens_total") == sum(lengths) + 20
    # Of the cancelled one the first token was accepted, if it came before the end: P makes it anyway.
    num_tokens = made("gateway", "baton_gateway_generation_tokens_total")
    assert sum(answers) <= num_tokens <= sum(answers) + 1
    assert made("gateway", "baton_gateway_time_to_first_token_seconds_count") == num_answered
    assert made("gateway", "baton_gateway_slo_requests_total", slo="ttft") == num_answered
    assert made("gateway", "baton_gateway_slo_requests_total", slo="tpot") == sum(n > 1 for n in answers)
    ttft_s = made("gateway", "baton_gateway_time_to_first_token_seconds_sum")
    assert made("gateway", "baton_gateway_ttft_stage_seconds_sum") == pytest.approx(ttft_s, abs=1e-3)
    e2e_s = made("gateway", "baton_gateway_e2e_request_latency_seconds_sum")
    assert ttft_s < e2e_s < made("gateway", "baton_gateway_stage_seconds_total")

    # P reads every prompt and makes every first token; D makes the rest, and nothing of a request that ended at one.
    assert made("prefill-0", "baton_prompt_tokens_computed_total") == sum(lengths) + 20
    assert made("prefill-0", "baton_tokens_generated_total") == num_answered + 1
    assert made("decode-0", "baton_tokens_generated_total") == sum(answers) - num_answered
    assert made("decode-0", "baton_prompt_tokens_computed_total") == 0
    assert made("prefill-0", "baton_attempts_ended_total", outcome="ok") == num_answered + 1
    assert made("decode-0", "baton_attempts_ended_total", outcome="ok") == sum(n > 1 for n in answers)
    handed = [length for length, n in zip(lengths, answers, strict=True) if n > 1]
    moved = sum(-(-length // 16) for length in handed) * block_bytes
    assert made("prefill-0", "baton_kv_sent_bytes_total", backend="nixl") == moved
    assert made("decode-0", "baton_kv_transfer_size_bytes_sum") == moved
    assert made("decode-0", "baton_kv_transfer_duration_seconds_count") == len(handed)
    received = made("decode-0", "baton_kv_received_bytes_total", backend="nixl")
    early = 20 // 16 + 16 // 16 + 1  # what may have moved of the two that were not taken
    assert moved <= received <= moved + early * block_bytes
    assert after.value("decode-0", "baton_kv_pair_bytes_total", peer="prefill-0") == received, "there were none before"
    assert made("decode-0", "baton_kv_transfers_total", outcome="ok") == len(handed)
    opened = made("prefill-0", "baton_kv_leases_total", outcome="opened")
    ended = [made("prefill-0", "baton_kv_leases_total", outcome=how) for how in ("released", "expired", "revoked")]
    assert opened == sum(ended) == num_answered + 1 and ended[1] == 0
    assert made("prefill-0", "baton_kv_hold_seconds_count") == opened
    assert made("router", "baton_router_placements_total") == num_answered + 1
    assert made("router", "baton_router_placements_ended_total") == num_answered + 1


async def test_after_two_hundred_aborts_nothing_is_left(engines: dict[str, Engine]) -> None:
    """Given up anywhere: at the router, while the prompt is read, in the hand-off, in the answer."""
    with _telemetries() as telemetries:
        cluster = LocalCluster(lambda worker_id: NixlBackend(), engines=engines, telemetries=telemetries)
        async with cluster:
            await _idle(cluster, telemetries)

            async def give_up(number: int) -> None:
                asking = asyncio.create_task(
                    cluster.complete([100 + number, *range(200, 220 + number % 30)], max_tokens=100, ignore_eos=True)
                )
                for _ in range(number * 7 % 199):
                    await asyncio.sleep(0)
                await asyncio.sleep(0.001 * (number % 40))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

            for first in range(0, 200, 20):
                await asyncio.gather(*[give_up(number) for number in range(first, first + 20)])
            after = await _idle(cluster, telemetries)
            num_begun = after.value("gateway", "baton_gateway_requests_total")
            assert after.value("gateway", "baton_gateway_requests_total", outcome="cancelled") == num_begun
            assert after.value("gateway", "baton_gateway_aborts_total", cause="client") == num_begun > 100
            assert after.value("router", "baton_router_placements_ended_total") == after.value(
                "router", "baton_router_placements_total"
            )
            leases = {
                how: after.value("prefill-0", "baton_kv_leases_total", outcome=how)
                for how in ("opened", "released", "expired", "revoked")
            }
            assert leases["opened"] == leases["released"] + leases["expired"] + leases["revoked"]
            assert (await cluster.complete("Rome is", max_tokens=2))["usage"]["completion_tokens"] == 2


def test_series_exist_before_there_is_anything_to_count() -> None:
    telemetry = Telemetry(component="gateway")
    GatewayMetrics(telemetry.registry, load_config(environ={}).models)
    text = telemetry.render_metrics().decode()
    for series in (
        f'baton_gateway_requests_total{{model="{MODEL}",outcome="no_worker"}} 0.0',
        f'baton_gateway_aborts_total{{cause="deadline",model="{MODEL}"}} 0.0',
        f'baton_gateway_ttft_stage_seconds_count{{model="{MODEL}",stage="transfer"}} 0.0',
        f'baton_gateway_slo_requests_total{{met="no",model="{MODEL}",slo="ttft"}} 0.0',
    ):
        assert series in text, series


def test_who_accepts_it_is_told_exemplars_and_names_stay() -> None:
    telemetry = Telemetry(component="gateway")
    alias = Gauge("vllm:num_requests_running", "As others name it.", registry=telemetry.registry)
    alias.set(3)
    latency = Histogram("latency_seconds", "Of a request.", registry=telemetry.registry)
    latency.observe(0.3, {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"})
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    assert metrics_type(accept).startswith("application/openmetrics-text")
    assert metrics_type("").startswith("text/plain") and metrics_type("*/*").startswith("text/plain")
    assert '# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"} 0.3' in telemetry.render_metrics(accept).decode()
    for each in ("", accept):
        assert "\nvllm:num_requests_running 3.0\n" in telemetry.render_metrics(each).decode()
