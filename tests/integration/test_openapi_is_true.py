"""Requests drawn from the OpenAPI page against a running gateway: no 5xx, and nothing that the page does not say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from core import types as t
from gateway.openapi import OPENAPI_PATH
from gateway.operations import OPERATIONS, Operation
from tests.support.scripted import Script
from tests.support.site import cluster_config, open_site, serve, served_model
from tests.support.tiny_tokenizer import ids_of
from tests.support.tool_templates import HERMES

LIMITS = {"max_body_bytes": 262_144, "max_requests": 64}
NUM_EXAMPLES = 12
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
"""Not: that all that fits the page is taken. A page cannot say what a vocabulary holds or which members exclude each
other."""


@pytest.fixture(scope="module")
def api() -> Iterator[schemathesis.BaseSchema]:
    """The page as the running gateway shows it. The gateway has a thread and a loop of its own."""
    listening, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    addresses: list[str] = []

    async def run() -> None:
        script = Script(
            steps=[ids_of("hello")],
            finish_reason=t.FinishReason.STOP,
            logprobs=lambda token_id: t.TokenLogprobs(logprob=-0.5, rank=1, top=((token_id, -0.5),)),
        )
        model = served_model(template=HERMES, max_context=4000)
        async with open_site(script, model=model, limits=LIMITS) as site:
            site.gateway.start()
            async with serve(site.gateway, cluster_config(limits=LIMITS).gateway) as address:
                loops.append(asyncio.get_running_loop())
                addresses.append(address)
                listening.set()
                await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="gateway")
    thread.start()
    assert listening.wait(30)
    yield schemathesis.openapi.from_url(f"http://{addresses[0]}{OPENAPI_PATH}")
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()


SERVED = [one for one in OPERATIONS if not one.path.startswith("/admin") and one.path != "/v1/usage"]
"""Without keys there are no routes about them."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "spoilt"])
@pytest.mark.parametrize("operation", SERVED, ids=lambda one: f"{one.method} {one.path}")
def test_what_the_page_says_is_what_comes(
    api: schemathesis.BaseSchema, operation: Operation, mode: GenerationMode
) -> None:
    drawn = api[operation.path][operation.method]
    if mode is GenerationMode.NEGATIVE and operation.body is None and "{" not in operation.path:
        return  # nothing in it can be spoilt

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()
