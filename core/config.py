"""The one configuration of a cluster: one YAML file for every process, then ``BATON__A__B``, then ``--set a.b=c``.

The only module that reads or writes the process environment. No ``None`` for "auto": say ``auto``. Facts learnt at
start (block count, vocabulary) are not configuration.
"""

import ctypes
import json
import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from core.access_config import AccessConfig
from core.costs import StepCosts
from core.errors import ConfigError
from core.handoff import DigestKind
from core.security_config import SecurityConfig
from core.types import ExecutionKind, Role

DEFAULT_MODEL = "smollm2-135m-instruct"
ENV_PREFIX = "BATON__"


def _check_listen(value: str) -> str:
    host, separator, port = value.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT (for example 127.0.0.1:8000)")
    return value


def _check_dialled(value: str) -> str:
    if value.startswith(("0.0.0.0", "[::]")):
        raise ValueError(f"{value!r} is no address that others can dial: name this machine's")
    return value


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` into its parts."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def _has_port(address: str) -> bool:
    """An IPv6 address without a port has colons too, and ends with a bracket."""
    return ":" in address and not address.endswith("]")


def _is_loopback(host: str) -> bool:
    """Only what is certain: a name other than localhost may resolve to anything, now or later."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Resources(_Section):
    """What one replica asks of its launcher."""

    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict)


class PoolConfig(_Section):
    """One pool: all workers of one model and role."""

    replicas: int = Field(default=1, ge=0, le=1024)
    max_step_tokens: int = Field(default=2048, ge=16)
    """Token budget of one step."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    max_queue: int = Field(default=256, ge=0)
    """Requests that may wait in one worker."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is served first: the oldest, or the lowest ``priority`` of a request and then the oldest. Who arrived last
    (with the highest number) is preempted first."""
    max_mixed_tokens: int = Field(default=256, ge=1)
    """Prompt tokens of a step in which answers advance too: bounds what a prompt adds to the time between two
    tokens."""
    device: Literal["cpu", "cuda", "interpreter"] = "cpu"
    """Where its workers compute: each on one core, or each on one NVIDIA GPU. ``interpreter`` runs the kernels of a GPU
    on a CPU, thousands of times slower, for tests."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one worker. One, pinned, is fastest on shared cores."""
    resources: Resources = Resources()


class KVConfig(_Section):
    block_size: int = Field(default=16, ge=1, le=1024)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    num_blocks: int | Literal["auto"] = "auto"
    memory_bytes: int | Literal["auto"] = "auto"
    """Size of the KV pool of one worker, when ``num_blocks`` is ``auto``. ``auto`` on CPU: 2 GiB, at most 1/8 of the
    memory."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Of a GPU's memory, what its worker may take: weights, steps and, with what is left, KV, when ``num_blocks`` and
    ``memory_bytes`` are ``auto``. Workers that share a GPU share it."""
    prefix_cache: bool = True
    """Keep complete blocks for their content; requests of one tenant that begin alike share them."""
    prefault: bool = True
    """Touch the pool's memory after the start, slowly, as long as half of the machine's memory stays available: the
    first transfers into memory that nobody has touched take ten times as long."""

    @field_validator("num_blocks")
    @classmethod
    def _some_blocks(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("must be 'auto' or at least 2")
        return value


class ExecutionConfig(_Section):
    """Whether workers run the model. ``mock`` is for benchmarks and drills: no weights are loaded, steps take as long
    as a table says, and answers are made up. A cluster says so wherever it speaks of its models."""

    kind: ExecutionKind = ExecutionKind.REAL
    costs: str | StepCosts | None = None
    """With ``mock``: the file of a cost table, or the table itself (core/costs.py)."""

    @model_validator(mode="after")
    def _costs_of_a_mock(self) -> Self:
        if self.kind is ExecutionKind.MOCK and self.costs is None:
            raise ValueError(
                "mock execution needs its costs: name a table with --set models.0.execution.costs=FILE "
                "(`python -m bench.cost_table --json FILE` measures one)"
            )
        if self.kind is ExecutionKind.REAL and self.costs is not None:
            raise ValueError("costs are those of mock execution: set kind to mock, or remove them")
        return self


class GenerationConfig(_Section):
    """Sampling values for requests that are silent. ``auto``: what the model's own files say, else OpenAI's default."""

    temperature: float | Literal["auto"] = "auto"
    top_p: float | Literal["auto"] = "auto"
    top_k: int | Literal["auto"] = "auto"
    min_p: float | Literal["auto"] = "auto"
    repetition_penalty: float | Literal["auto"] = "auto"
    max_new_tokens: int | Literal["auto"] = "auto"
    """A cap on every answer of this model."""

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        bounds = {"temperature": (0, 2), "top_p": (1e-6, 1), "top_k": (0, 1 << 31), "min_p": (0, 1)}
        bounds |= {"repetition_penalty": (1e-6, 100), "max_new_tokens": (1, 1 << 31)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value != "auto" and not low <= value <= high:
                raise ValueError(f"{name} is {value}; say auto or a number from {low:g} to {high:g}")
        return self


class SizeLimits(_Section):
    """Between what an autoscaler may size a pool."""

    min: int = Field(default=1, ge=0, le=1024)
    max: int = Field(default=8, ge=1, le=1024)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max {self.max}: min must not be more")
        return self


class AutoscaleConfig(_Section):
    """How the pools of one model are sized, both together (router/autoscaler.py)."""

    mode: Literal["off", "observe", "act"] = "observe"
    """``observe`` decides, logs and shows what it would do; ``act`` does it."""
    prefill: SizeLimits = SizeLimits()
    decode: SizeLimits = SizeLimits()
    unified: SizeLimits = SizeLimits()
    ttft_s: float = Field(default=2, gt=0)
    tpot_s: float = Field(default=0.1, gt=0)
    """The objectives: until the first token, and between tokens."""
    interval_s: float = Field(default=5, gt=0)
    window_s: float = Field(default=60, gt=0)
    """Over which demand is measured."""
    start_s: float = Field(default=30, ge=0)
    """What a new worker needs until it serves: so far ahead demand is projected."""
    up_use: float = Field(default=0.8, gt=0, le=1)
    """A pool is too small when more of it than this is needed ..."""
    down_use: float = Field(default=0.7, gt=0, le=1)
    """... and may lose a worker when the others would be used less than this."""
    max_step_up: int = Field(default=2, ge=1)
    up_stable_s: float = Field(default=10, ge=0)
    up_cooldown_s: float = Field(default=30, ge=0)
    down_stable_s: float = Field(default=300, ge=0)
    down_cooldown_s: float = Field(default=120, ge=0)

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        if self.down_use > self.up_use:
            raise ValueError(f"down_use is {self.down_use:g} and up_use {self.up_use:g}: sizes would go up and down")
        return self

    def limits(self, role: Role) -> SizeLimits:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.UNIFIED: self.unified}[role]


class ModelConfigSection(_Section):
    """One served model and its pools."""

    name: str = Field(default=DEFAULT_MODEL, min_length=1, max_length=200)
    revision: str = Field(default="", max_length=64)
    """Names this state of the section: hand-offs never cross from one revision to another. `baton rollout start` gives
    one."""
    path: str = DEFAULT_MODEL
    """An alias, a local folder, a .gguf file, or a hub id."""
    max_context: int | Literal["auto"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    invariant: bool | Literal["auto"] = "auto"
    """Bitwise equal results under any batching (law 3). ``auto``: on CPU, where it costs little; on a GPU it keeps a
    sequence's keys in one place and products in one tile size, which is slower."""
    execution: ExecutionConfig = ExecutionConfig()
    generation: GenerationConfig = GenerationConfig()
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder"] = "auto"
    """How the model writes calls of tools. ``auto``: as its chat template teaches it; where that knows no tools, an
    instruction of ours asks for ``hermes``."""
    reasoning: Literal["auto", "think", "off"] = "auto"
    """Whether the model reasons between ``<think>`` and ``</think>``. ``auto``: if its template or vocabulary has the
    marks."""
    kv: KVConfig = KVConfig()
    pools: dict[Role, PoolConfig] = Field(
        default_factory=lambda: {Role.PREFILL: PoolConfig(), Role.DECODE: PoolConfig()}
    )
    autoscale: AutoscaleConfig = AutoscaleConfig()

    @field_validator("pools")
    @classmethod
    def _some_pool(cls, pools: dict[Role, PoolConfig]) -> dict[Role, PoolConfig]:
        if not pools:
            raise ValueError("name at least one pool: 'unified', or 'prefill' and 'decode'")
        if (Role.PREFILL in pools) != (Role.DECODE in pools):
            missing = Role.DECODE if Role.PREFILL in pools else Role.PREFILL
            raise ValueError(f"pool '{missing}' is missing: prefill and decode go together (or use a 'unified' pool)")
        return pools


class LimitsConfig(_Section):
    max_body_bytes: int = Field(default=4_194_304, ge=1024)
    max_header_bytes: int = Field(default=32_768, ge=1024)
    """Of a request's line and headers together."""
    header_timeout_s: float = Field(default=20, gt=0)
    """How long the line and the headers may take to arrive."""
    body_timeout_s: float = Field(default=30, gt=0)
    request_timeout_s: float = Field(default=600, gt=0)
    """Deadline of a request, all attempts together."""
    slow_reader_s: float = Field(default=30, gt=0)
    """How long the client of a stream may read nothing while there is more for it; then its request is aborted."""
    stream_keep_alive_s: float = Field(default=15, gt=0)
    """A stream that has nothing to say for so long says so by a comment: proxies cut what is silent. It begins with the
    first one: an error after it is told inside the stream."""
    max_attempts: int = Field(default=4, ge=1, le=100)
    max_requests: int = Field(default=1024, ge=1)
    """Requests one gateway process works on at once; more are refused."""
    max_stop_strings: int = Field(default=4, ge=1)
    max_stop_token_ids: int = Field(default=64, ge=1)
    max_logprobs: int = Field(default=20, ge=0)
    max_tools: int = Field(default=128, ge=0)
    """Tools that a request may offer, and calls of them in one answer."""
    max_choices: int = Field(default=128, ge=1)
    """Choices of one request: its prompts times ``n``."""
    drain_wait_s: float = Field(default=0, ge=0)
    """After SIGTERM: how long `/ready` says no while requests are still taken, so that a load balancer notices."""
    drain_s: float = Field(default=30, ge=0)
    """After that, how long running requests may go on. Both together must be less than the launcher's grace."""


class TlsConfig(_Section):
    cert: str
    """PEM file: the certificate, then those between it and the root."""
    key: str
    """PEM file, without a password."""
    reload_s: float = Field(default=10, gt=0)
    """How often the files are looked at; a changed pair serves new connections without a restart."""


class CorsConfig(_Section):
    """Which web pages may call this API from a browser. None, unless named."""

    origins: tuple[str, ...] = ()
    """Such as ``https://app.example.org``, or ``*`` for every page."""
    max_age_s: int = Field(default=600, ge=0)

    @field_validator("origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
                raise ValueError(f"{origin!r} is not an origin: write SCHEME://HOST[:PORT] without a path, or '*'")
        return value


class GatewayConfig(_Section):
    listen: str = "127.0.0.1:8000"
    processes: int = Field(default=1, ge=1, le=64)
    """Gateway processes on the one port; the kernel spreads connections over them. With several each has a port of its
    own for probes and metrics too."""
    http_listen: str = "auto"
    """A port of probes and metrics alone (plain HTTP, no keys), for a platform that asks and scrapes from inside.
    ``auto``: a free one with several processes, else none."""
    access: AccessConfig = AccessConfig()
    tls: TlsConfig | None = None
    """Null serves plain HTTP."""
    cors: CorsConfig = CorsConfig()
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Members of a body that this API does not know: counted and ignored (clients send extras of others), or 400."""
    limits: LimitsConfig = LimitsConfig()

    @property
    def url(self) -> str:
        """As a client on this machine reaches it."""
        host, port = split_address(self.listen)
        host = "127.0.0.1" if host in ("0.0.0.0", "[::]") else host
        return f"{'http' if self.tls is None else 'https'}://{host}:{port}"

    @field_validator("listen", "http_listen")
    @classmethod
    def _listen(cls, value: str, info: ValidationInfo) -> str:
        return value if info.field_name == "http_listen" and value == "auto" else _check_listen(value)

    @model_validator(mode="after")
    def _one_port_each(self) -> Self:
        if self.processes > 1 and self.http_listen != "auto" and split_address(self.http_listen)[1] != 0:
            raise ValueError(
                f"{self.processes} processes cannot share the probes' port {self.http_listen}: say http_listen: auto, "
                "or run one process"
            )
        return self

    @model_validator(mode="after")
    def _limits_of_several(self) -> Self:
        if self.processes > 1 and self.access.has_keys and self.access.limits_store == "memory":
            raise ValueError(
                f"{self.processes} gateway processes would each count rates for themselves: name a store that they "
                "share with --set gateway.access.limits_store=redis://HOST:PORT/0, or run one process"
            )
        return self

    @model_validator(mode="after")
    def _loopback_without_keys(self) -> Self:
        if not self.access.has_keys and not _is_loopback(split_address(self.listen)[0]):
            raise ValueError(
                f"without API keys only this machine is served, and other machines reach {self.listen}: name a "
                "database of keys with --set gateway.access.database=FILE (make keys with `baton keys create`), or "
                "listen on 127.0.0.1"
            )
        return self


class BreakEvenConfig(_Section):
    """How ``router.mode: auto`` weighs split against local."""

    gap_weight: float = Field(default=0.25, ge=0)
    """What a second of waiting for the second token is worth beside one for the first."""
    itl_weight: float = Field(default=0.1, ge=0)
    """What a second is worth by which running answers are held up, all together."""
    ttft_slack: float = Field(default=0.05, ge=0)
    """Both together count for no more than this share of the time to the first token: what may be given up of it to
    spare a gap or running answers."""
    explore: float = Field(default=0.02, ge=0, le=0.5)
    """The share of requests that take the way that seems dearer (up to three times), so that its cost stays known."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Which requests those are is a function of this and of their id."""


class RouterConfig(_Section):
    listen: str = "127.0.0.1:7000"
    advertise: str = "auto"
    """HOST:PORT by which gateways, workers and the command line reach the router where that is not what it binds (a
    service of Kubernetes, a proxy). ``auto``: as bound."""
    http_listen: str = "127.0.0.1:0"
    """Probes and metrics of the router. Port 0 takes a free one."""
    heartbeat_s: float = Field(default=0.5, gt=0)
    heartbeat_timeout_s: float = Field(default=3, gt=0)
    placement_wait_s: float = Field(default=60, gt=0)
    """How long a request may wait for a worker that is not there now."""
    max_waiting: int = Field(default=1024, ge=0)
    """Requests that may wait, of each model. More are refused, or take the place of a lower priority class or of a
    tenant with more of them."""
    max_wait_s: float = Field(default=30, gt=0)
    """How long a request may wait for room at workers. One that would wait longer, as fast as the queue is served, is
    refused at once."""
    prefill_backlog_s: float = Field(default=1, gt=0)
    """Prompts that may wait in a worker, in seconds of its work; others wait at the router, where the most urgent goes
    first."""
    decode_backlog: float = Field(default=0.5, ge=0)
    """Requests that a decode worker may have beyond its ``max_sequences`` and its KV blocks, as a share of them: their
    prompts are read meanwhile, and whoever ends is followed at once."""
    max_transfers: int = Field(default=256, ge=1)
    """Hand-offs that may be in flight to one decode worker when another one is placed on it."""
    mode: Literal["auto", "split", "local"] = "auto"
    """``auto``: where a prefill pool exists, what is predicted to be cheaper, by costs that are measured all the time.
    ``split`` always uses that pool, ``local`` makes decode workers prefill themselves."""
    break_even: BreakEvenConfig = BreakEvenConfig()
    fallback: Literal["allow", "when_short", "deny"] = "allow"
    """Whether a decode worker may prefill a prompt itself when no prefill worker is there, or when every hand-off to it
    has failed: always, up to ``fallback_tokens``, or never (requests then wait for a prefill worker)."""
    fallback_tokens: int = Field(default=1024, ge=1)
    """The longest prompt that is ``when_short``."""
    fallback_after_s: float = Field(default=2, ge=0)
    """A prefill pool that has been without a ready worker for less than this is only starting anew: requests wait."""
    policy: Literal["prefix_aware", "round_robin"] = "prefix_aware"
    """``round_robin`` takes workers in turn, whatever they hold and have to do: for comparisons."""
    distance_s: float = Field(default=0.005, ge=0)
    """What each level by which a pair is apart (other host, other rack, other zone) costs beside its waiting times."""
    max_records: int = Field(default=1000, ge=1)

    @property
    def address(self) -> str:
        """What others dial."""
        return self.listen if self.advertise == "auto" else self.advertise

    @field_validator("listen", "http_listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return _check_listen(value)

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, value: str) -> str:
        return value if value == "auto" else _check_dialled(_check_listen(value))

    @model_validator(mode="after")
    def _timeouts(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ValueError("heartbeat_timeout_s must be at least twice heartbeat_s, or healthy workers look dead")
        return self


class TransferConfig(_Section):
    backend: Literal["nixl", "tcp", "dist", "inproc"] = "nixl"
    """What moves KV between workers. ``inproc`` is for tests within one process."""
    fallback: Literal["tcp", "none"] = "tcp"
    """For pairs that ``backend`` does not connect, or connects only by emulated reads: each pair chooses at its
    handshake. Host memory only."""
    lease_s: float = Field(default=15, gt=0)
    renew_s: float = Field(default=4, gt=0)
    digest: DigestKind = DigestKind.WSUM64
    early_reads: bool = True
    """Blocks of a prompt move while the rest of it is computed."""
    stall_s: float = Field(default=10, gt=0)
    """A transfer without progress for so long is given up; its blocks stay in custody until it is terminal."""
    handshake_s: float = Field(default=5, gt=0)
    circuit_failures: int = Field(default=3, ge=1)
    """So many hand-offs of a pair fail in a row, and it is left alone ..."""
    circuit_open_s: float = Field(default=2, gt=0)
    """... for so long; then its canary is read again, and on failure the time doubles, up to a minute."""
    held_fraction: float = Field(default=0.9, gt=0, le=1)
    """Quota of a prefill worker: the share of its blocks that may be held under leases."""
    max_leases: int = Field(default=1024, ge=1)
    min_gb_per_s: float = Field(default=0, ge=0)
    """What every pair is declared to reach, in 10^9 bytes a second: `baton doctor` says which do not. 0 declares
    nothing."""

    @field_validator("digest", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return DigestKind.OFF if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="after")
    def _renewals(self) -> Self:
        if self.renew_s * 2 > self.lease_s:
            raise ValueError("renew_s must be at most half of lease_s, or one late renewal ends a lease")
        return self


class TelemetryConfig(_Section):
    otlp_endpoint: str | None = None
    """Where spans go; null exports nothing."""
    otlp_protocol: Literal["grpc", "http"] = "grpc"
    """``http`` sends protobuf to the endpoint's ``/v1/traces``."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced, of those whose caller says nothing: who sends a ``traceparent`` decides."""
    record_prompts: bool = False
    """Spans bear the text of prompts and answers. Personal data leaves the cluster with them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("otlp_endpoint")
    @classmethod
    def _says_whether_it_has_tls(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+.*", value):
            raise ValueError("is not a URL: say http://HOST:4317, or https://HOST:4317 where the collector has TLS")
        return value


class WorkerConfig(_Section):
    """What every worker process shares."""

    host: str = "127.0.0.1"
    """Address that workers bind. ``auto``: that of the interface which leads to the router."""
    port: int = Field(default=0, ge=0, le=65535)
    http_port: int = Field(default=0, ge=0, le=65535)
    """Of probes and metrics. 0 takes a free one; any other is for one worker in a network of its own (a container)."""
    advertise: str = "auto"
    """How others reach a worker's gRPC port where that is not what it binds (NAT, a proxy): HOST, with the port that is
    bound, or HOST:PORT. ``auto``: as bound."""
    drain_s: float = Field(default=30, ge=0)
    projected_tokens: int = Field(default=256, ge=1)
    """Answer length for which a decode worker reserves room when the caller allows more."""
    labels: dict[Literal["zone", "rack", "host"], str] = Field(default_factory=dict)
    """Where a worker runs, for placing near pairs. Without ``host`` it is the machine's name."""
    pin_threads: bool = True

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, value: str) -> str:
        _check_dialled(value)
        return _check_listen(value) if _has_port(value) else value

    def advertised(self, bound: str) -> str:
        """What others dial, of a worker that is bound to ``bound``."""
        if self.advertise == "auto":
            return bound
        return self.advertise if _has_port(self.advertise) else f"{self.advertise}:{split_address(bound)[1]}"


class RayConfig(_Section):
    address: str = "local"
    """``local`` starts an embedded Ray; anything else is the address of a running cluster."""


class KubernetesConfig(_Section):
    """For `baton place` in a pod: Kubernetes runs the workers, and their number follows the router."""

    release: str = ""
    """The label ``app.kubernetes.io/instance`` of the workloads that are scaled."""
    memory: str = ""
    """ConfigMap that remembers sizes which were said live."""
    api: str = "https://kubernetes.default.svc"
    namespace: str = ""
    """Empty: that of ``namespace_file``."""
    namespace_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    token_file: str | None = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: str | None = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"


class LauncherConfig(_Section):
    kind: Literal["ray", "process", "kubernetes"] = "ray"
    """``kubernetes`` is for `baton place` alone."""
    ray: RayConfig = RayConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    start_timeout_s: float = Field(default=180, gt=0)
    stop_s: float = Field(default=8, gt=0)


class ClusterConfig(_Section):
    """Everything about a cluster that an operator may say."""

    models: tuple[ModelConfigSection, ...] = (ModelConfigSection(),)
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    transfer: TransferConfig = TransferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    worker: WorkerConfig = WorkerConfig()
    launcher: LauncherConfig = LauncherConfig()
    security: SecurityConfig = SecurityConfig()
    failpoints: dict[str, str] = Field(default_factory=dict)
    """Named faults for tests (core/failpoints.py). Empty in production."""

    @model_validator(mode="after")
    def _distinct_models(self) -> Self:
        if not self.models:
            raise ValueError("models: name at least one model")
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}: give each its own name")
        return self

    @model_validator(mode="after")
    def _reaches_gpus(self) -> Self:
        on_gpu = [
            f"{model.name}: {role}"
            for model in self.models
            for role, pool in model.pools.items()
            if pool.device == "cuda"
        ]
        if on_gpu and self.transfer.backend != "nixl":
            raise ValueError(
                f"transfer.backend {self.transfer.backend!r} does not reach the memory of a GPU ({', '.join(on_gpu)}): "
                "set it to nixl, or device to cpu"
            )
        return self

    @model_validator(mode="after")
    def _nothing_in_the_clear(self) -> Self:
        if self.security.is_on and self.transfer.backend == "dist":
            raise ValueError(
                f"transfer.backend is 'dist', whose library has no TLS, and security.tls is {self.security.tls!r}: use "
                "tcp, which has it, or nixl, whose agents meet over mTLS only; or set security.tls to 'off'"
            )
        return self

    def model(self, name: str) -> ModelConfigSection:
        for model in self.models:
            if model.name == name:
                return model
        raise ConfigError(f"model {name!r} is not configured; configured: {', '.join(m.name for m in self.models)}")


# -- loading ----------------------------------------------------------------------------------------------------------


def load_config(
    path: str | None = None, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> ClusterConfig:
    """File, then environment (``BATON__ROUTER__LISTEN=...``), then ``--set router.listen=...``; the last one wins.

    Values are read as YAML. List items are addressed by number: ``models.0.kv.block_size=32``.
    Raises ConfigError with one line for each problem, naming the dotted key.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_yaml(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            keys = [key.lower() for key in name.removeprefix(ENV_PREFIX).split("__")]
            _assign(data, keys, _read_value(text, source=name), source=name)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r} is not KEY=VALUE (for example --set router.listen=127.0.0.1:7000)")
        _assign(data, key.split("."), _read_value(text, source=f"--set {key}"), source=f"--set {key}")
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> ClusterConfig:
    """Validate plain data. Raises ConfigError."""
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in item["loc"]) or "config"
            what = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                what = f"unknown key{_suggest(item['loc'])}"
            lines.append(f"{where}: {what}")
        raise ConfigError("bad configuration: " + "; ".join(dict.fromkeys(lines))) from None


def dump_config(config: ClusterConfig) -> str:
    """The effective configuration as YAML; ``load_config`` of it gives an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def config_to_json(config: ClusterConfig) -> str:
    """One line, for the command line of a child process."""
    return json.dumps(config.model_dump(mode="json"), separators=(",", ":"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}; check the path given to --config"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not UTF-8 text") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold a mapping with keys such as 'models' and 'gateway'")
    return data


def _read_value(text: str, *, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{source}: {text!r} is not a YAML value") from None


def _assign(data: dict[str, Any], keys: Sequence[str], value: Any, *, source: str) -> None:
    """Set ``data[k1][k2]...``. A list that is not there yet grows by one item at a time."""
    _keep_default_pools(data, keys)
    here: Any = data
    for position, key in enumerate(keys):
        is_last = position == len(keys) - 1
        if isinstance(here, list):
            if not key.isdigit() or int(key) > len(here):
                raise ConfigError(f"{source}: {key!r} is not the number of an item (0 to {len(here)})")
            if int(key) == len(here):
                here.append({})
            index: Any = int(key)
        elif isinstance(here, dict):
            index = key
            if not is_last and here.get(key) is None:
                here[key] = [] if keys[position + 1].isdigit() else {}
        else:
            raise ConfigError(f"{source}: {'.'.join(keys[:position])} is a value, not a section")
        if is_last:
            here[index] = value
        else:
            here = here[index]


def _keep_default_pools(data: dict[str, Any], keys: Sequence[str]) -> None:
    """A setting of one default pool (``models.0.pools.decode.replicas``) does not remove the other one."""
    match keys:
        case ["models", number, "pools", (Role.PREFILL | Role.DECODE), _, *_] if number.isdigit():
            models = data.setdefault("models", [{}])
            if isinstance(models, list) and int(number) < len(models) and isinstance(models[int(number)], dict):
                models[int(number)].setdefault("pools", {Role.PREFILL.value: {}, Role.DECODE.value: {}})
        case _:
            pass


def _suggest(location: Sequence[str | int]) -> str:
    """``; known here: a, b`` for an unknown key, found by walking the model tree."""
    section: Any = ClusterConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        section = _descend(section, part)
        if section is None:
            return ""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return f"; known here: {', '.join(section.model_fields)}"
    return ""


def _descend(section: Any, part: str) -> Any:
    if isinstance(section, type) and issubclass(section, BaseModel):
        info = section.model_fields.get(part)
        annotation = info.annotation if info is not None else None
    else:
        annotation = section
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


# -- the process environment ------------------------------------------------------------------------------------------


def set_worker_environment(num_threads: int, *, interprets: bool = False) -> None:
    """Thread counts of native libraries and transport settings, and whether Triton interprets its kernels. Must run
    before torch, triton, numpy or nixl are imported.

    One thread per worker by default: spinning OpenMP threads on shared cores cost up to 100x (measured).
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if interprets:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # UCX logs to standard output otherwise
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    transports = os.environ.get("UCX_TLS")
    if transports and "tcp" not in transports.split(",") and transports != "all" and not transports.startswith("^"):
        os.environ["UCX_TLS"] = f"{transports},tcp"
    _keep_freed_memory()


def ucx_transports() -> str:
    """The transports that UCX is restricted to, if it is."""
    return os.environ.get("UCX_TLS", "")


def _keep_freed_memory() -> None:
    """Let glibc serve large tensors from its heap: mapped and unmapped in every step, their pages would fault each time
    (40 % of a worker's faults, measured). Elsewhere nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_* of malloc.h
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 1 << 30)
    mallopt(top_pad, 64 << 20)


def read_secret(name: str, path: str | None) -> str | None:
    """A secret from the file at `path`, or else from the environment variable `name`; never from the configuration,
    which is printed, logged and passed on command lines. Raises ConfigError for a file that cannot be read or is
    empty."""
    if path is None:
        return os.environ.get(name) or None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the secret in {path}: {reason}; correct the path or its permissions") from None
    if not secret:
        raise ConfigError(f"the file {path} is empty; it must hold a secret")
    return secret


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process: this one's without BATON__ settings (the child gets the effective
    config)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ.update(extra or {})
    return environ
