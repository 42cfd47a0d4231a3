"""A whole gateway over a scripted cluster and the made-up tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from core.config import ClusterConfig, parse_config
from core.ids import GatewayId, Incarnation
from core.telemetry import Telemetry
from gateway.app import Gateway
from gateway.models import ServedModel
from modelfiles import ChatTemplate, GenerationDefaults
from tests.support.asgi import Client
from tests.support.scripted import Script, ScriptedCluster
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_CONTEXT = 200


@dataclass
class Site:
    """A gateway, its client and the cluster behind it."""

    client: Client
    cluster: ScriptedCluster
    gateway: Gateway
    telemetry: Telemetry


OpenSite = Callable[..., AbstractAsyncContextManager[Site]]


def served_model() -> ServedModel:
    tokenizer = tiny_tokenizer()
    eos = tokenizer.added_id(EOS_TEXT)
    assert eos is not None
    return ServedModel(
        name="m",
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE, "tiny"),
        defaults=GenerationDefaults(),
        max_context=MAX_CONTEXT,
        vocab_size=tokenizer.num_tokens,
        eos_token_ids=(eos,),
        created=1,
    )


def cluster_config() -> ClusterConfig:
    limits = {"max_body_bytes": 4096, "max_attempts": 3, "max_requests": 4, "drain_s": 0.05}
    return parse_config({"models": [{"name": "m"}], "gateway": {"limits": limits}})


@pytest.fixture
def open_site() -> OpenSite:
    @asynccontextmanager
    async def opened(script: Script | None = None) -> AsyncIterator[Site]:
        cluster = ScriptedCluster(script or Script(steps=[[one] for one in ids_of("hello world")]))
        telemetry = Telemetry(component="gateway")
        gateway = Gateway(
            cluster_config(),
            router=cluster,
            clients=cluster,
            models=[served_model()],
            telemetry=telemetry,
            gateway_id=GatewayId("g"),
            incarnation=Incarnation(7),
        )
        yield Site(client=Client(gateway.asgi), cluster=cluster, gateway=gateway, telemetry=telemetry)
        await gateway.close()

    return opened
