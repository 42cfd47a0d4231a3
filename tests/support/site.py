"""A whole gateway over a scripted cluster and the made-up tokenizer: called directly, or served on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.config import ClusterConfig, GatewayConfig, parse_config
from core.ids import GatewayId, Incarnation
from core.tasks import TaskScope
from core.telemetry import Telemetry
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.server import Server
from gateway.tls import Certificate
from gateway.tools.dialect import dialect_of
from modelfiles import ChatTemplate, GenerationDefaults, Tokenizer
from tests.support.asgi import Client
from tests.support.scripted import Script, ScriptedCluster
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if signature is defined %}{{ signature }}{% endif %}"
)
MAX_CONTEXT = 200


@dataclass
class Site:
    """A gateway, its client and the cluster behind it."""

    client: Client
    cluster: ScriptedCluster
    gateway: Gateway
    telemetry: Telemetry


def served_model(
    tokenizer: Tokenizer | None = None, *, template: str = TEMPLATE, max_context: int = MAX_CONTEXT
) -> ServedModel:
    tokenizer = tokenizer or tiny_tokenizer()
    eos = tokenizer.added_id(EOS_TEXT)
    assert eos is not None
    compiled = ChatTemplate(template, "tiny")
    return ServedModel(
        name="m",
        tokenizer=tokenizer,
        template=compiled,
        dialect=dialect_of(compiled, tokenizer),
        defaults=GenerationDefaults(),
        max_context=max_context,
        vocab_size=tokenizer.num_tokens,
        eos_token_ids=(eos,),
        created=1,
    )


def cluster_config(**gateway: object) -> ClusterConfig:
    """`gateway` is added to the section of that name; its `limits` to those below."""
    limits = {"max_body_bytes": 4096, "max_attempts": 3, "max_requests": 4, "drain_s": 0.05}
    more = gateway.pop("limits", {})
    assert isinstance(more, dict)
    return parse_config({"models": [{"name": "m"}], "gateway": {"limits": limits | more, **gateway}})


@asynccontextmanager
async def open_site(
    script: Script | None = None, *, model: ServedModel | None = None, **settings: object
) -> AsyncIterator[Site]:
    """`settings` belong to the configuration's gateway section. Without a `model` it is the made-up one."""
    cluster = ScriptedCluster(script or Script(steps=[[one] for one in ids_of("hello world")]))
    telemetry = Telemetry(component="gateway")
    gateway = Gateway(
        cluster_config(**settings),
        router=cluster,
        clients=cluster,
        models=[model or served_model()],
        telemetry=telemetry,
        gateway_id=GatewayId("g"),
        incarnation=Incarnation(7),
    )
    site = Site(client=Client(gateway.asgi), cluster=cluster, gateway=gateway, telemetry=telemetry)
    try:
        yield site
    finally:
        await gateway.close()


@asynccontextmanager
async def serve(gateway: Gateway, config: GatewayConfig) -> AsyncIterator[str]:
    """A gateway behind a real socket on loopback, by the product's own server; yields ``host:port``."""
    certificate = Certificate(config.tls) if config.tls is not None else None
    # Without the protocol asyncio leaves Nagle's algorithm on, and every small answer waits 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = Server(gateway, config, certificate)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    upkeep = TaskScope("certificate")
    if certificate is not None:
        upkeep.spawn(certificate.follow(), name="certificate")
    try:
        while not server.started:
            assert not serving.done(), "the server ended"
            await asyncio.sleep(0)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        await upkeep.close()
