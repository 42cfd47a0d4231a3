"""The control messages of the hand-off between real processes: lost, doubled, late and out of order; from peers that do
not fit; from readers that die while the holder hangs; and the trace context that they carry."""

import asyncio
import json
import secrets
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from core.errors import LayoutMismatch, error_from_slug
from core.handoff import Hello, LinkInfo, PeerInfo, ToHolder
from core.ids import WorkerId, new_incarnation
from core.kv import KVFormat, KVGeometry
from core.types import ClusterStatus, WorkerAddress, WorkerState
from deploy.launcher import ComponentSpec
from rpc.clients import HandoffClient
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import TINY, Load, Question, ask, incarnation, learn, questions, tiny_settings, wait_new

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
DEADLINE_S = 6.0
LEASE_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mangled")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[ProcessCluster]:
    def mangle(spec: ComponentSpec) -> ComponentSpec:
        argv = [part.replace("baton.process", "tests.support.mangled_process") for part in spec.argv[:3]]
        return replace(spec, argv=(*argv, *spec.argv[3:]), env={"MANGLED": str(folder)})

    settings = (
        *tiny_settings(tmp_path_factory.mktemp("model")),
        f"gateway.limits.request_timeout_s={DEADLINE_S}",
        f"transfer={{lease_s: {LEASE_S}, renew_s: 0.5, handshake_s: 2}}",
        f"failpoints={{decode.granted: 'when:{folder / 'granted'}:pause:60'}}",
    )
    async with ProcessCluster(tmp_path_factory.mktemp("logs"), *settings, edit=mangle) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(cluster: ProcessCluster) -> list[Question]:
    made = questions(9, 12, longest=300, num_tokens=12)
    await learn(cluster, made)
    return made


def seen(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


async def test_messages_are_lost_doubled_late_and_out_of_order(
    cluster: ProcessCluster, asked: list[Question], folder: Path
) -> None:
    """Whatever becomes of them, a request ends with the right answer or with a typed error, and nothing is left."""
    odds = folder / "odds"
    odds.write_text(json.dumps({"drop": 0.04, "double": 0.15, "late": 0.15, "swap": 0.1}))
    before = len(seen(folder))
    try:
        async with Load(cluster, asked, 12, seed=3) as load:
            while sum(load.counts.values()) < 150:
                await asyncio.sleep(0.05)
    finally:
        odds.unlink()
    for slug in set(load.counts) - {"right"}:
        assert error_from_slug(slug, "").slug == slug != "internal_error", load.counts
    assert load.counts["right"] > 75, load.counts
    fates = Counter(f"{one['kind']} {one['fate']}" for one in seen(folder)[before:] if one["fate"])
    assert {kind.split()[1] for kind in fates} == {"drop", "double", "late", "swap"}
    print(f"{dict(load.counts)}; {sum(fates.values())} messages mangled: {dict(sorted(fates.items()))}")
    await cluster.wait_idle(DEADLINE_S + 3 * LEASE_S + 30)
    for question in asked:
        assert (await ask(cluster, question))["choices"][0]["token_ids"] == question.answer


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
async def test_a_reader_dies_in_mid_hand_off(
    cluster: ProcessCluster, asked: list[Question], folder: Path, is_stopped: bool
) -> None:
    """With blocks granted to it. The holder lives, the lease ends in time, the request ends right or typed."""
    holder, reader = await incarnation(cluster, "prefill-0"), await incarnation(cluster, "decode-0")
    armed = folder / "granted"
    armed.touch()
    asking = asyncio.create_task(_outcome(cluster, asked[0]))
    await cluster.wait_for("the grant", lambda _: not armed.exists(), 30)
    if is_stopped:
        cluster.kill("prefill-0", signal.SIGSTOP)
    cluster.kill("decode-0")
    if is_stopped:
        await cluster.wait_for("the death", lambda status: _state(status, "decode-0") is not WorkerState.READY, 30)
        cluster.kill("prefill-0", signal.SIGCONT)

    def has_no_lease(status: ClusterStatus) -> bool:
        return any(
            w.registration.worker_id == "prefill-0" and w.state is WorkerState.READY and w.load.num_leases == 0
            for w in status.workers
        )

    await cluster.wait_for("the end of the lease", has_no_lease, 20)
    assert await incarnation(cluster, "prefill-0") == holder, "the holder died of it"
    outcome = await asking
    assert outcome == "right" or error_from_slug(outcome, "").slug == outcome != "internal_error"
    await wait_new(cluster, "decode-0", reader)
    assert await _outcome(cluster, asked[0]) == "right"
    await cluster.wait_idle()


def _state(status: ClusterStatus, worker_id: str) -> WorkerState:
    states = [w.state for w in status.workers if w.registration.worker_id == worker_id]
    return states[-1] if states else WorkerState.LOST


async def _outcome(cluster: ProcessCluster, question: Question) -> str:
    body = {"model": TINY, "prompt": question.prompt, "temperature": 0, "max_tokens": question.num_tokens}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = await cluster.http.post("/v1/completions", json=body)
    content = answer.json()
    if answer.status_code != 200:
        return str(content["error"]["code"])
    assert content["choices"][0]["token_ids"] == question.answer
    return "right"


async def test_one_trace_context_reaches_everybody(
    cluster: ProcessCluster, asked: list[Question], folder: Path
) -> None:
    """The caller's trace id is in what the router, both workers and the holder's stream are told, and in the record."""
    trace_id = secrets.token_hex(16)
    before = len(seen(folder))
    answer = await cluster.http.post(
        "/v1/completions",
        json={"model": TINY, "prompt": asked[0].prompt, "max_tokens": 4},
        headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
    )
    assert answer.status_code == 200
    lines = [one for one in seen(folder)[before:] if trace_id in one["traceparent"]]
    kinds = {(one["process"], one["kind"]) for one in lines}
    assert {
        ("router", "PlaceRequest"),
        ("decode-0", "AdmitRequest"),
        ("prefill-0", "PrefillRequest"),
        ("decode-0", "Open"),
    } <= kinds, kinds
    records = await cluster.router.find_records("", 1000)
    while not any(trace_id in record.traceparent for record in records.records):  # told when the gateway next reports
        await asyncio.sleep(0.05)
        records = await cluster.router.find_records("", 1000)


# -- peers that do not fit --------------------------------------------------------------------------------------------


async def _handshake(cluster: ProcessCluster, peer: PeerInfo) -> None:
    registration = (await cluster.worker("prefill-0")).registration
    address = WorkerAddress(
        worker_id=registration.worker_id, incarnation=registration.incarnation, address=registration.address
    )

    async def messages() -> AsyncIterator[ToHolder]:
        yield Hello(peer=peer)
        await asyncio.Event().wait()

    async with HandoffClient(address) as client, aclosing(client.connect(messages())) as replies:
        await anext(replies)


FORMAT = KVFormat(
    model_digest="m",
    tokenizer_digest="t",
    template_digest="c",
    compute_dtype="float32",
    kv_dtype="float32",
    quantisation="none",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
)
GEOMETRY = KVGeometry(num_blocks=8, block_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=4)


async def test_a_peer_that_does_not_fit_is_refused_and_every_factor_is_named(cluster: ProcessCluster) -> None:
    """Another revision of the weights, another KV type, other layers: said in words, before anything else is used."""
    wrong = replace(FORMAT, kv_dtype="float16", num_layers=3, quantisation="int8")
    link = LinkInfo(backend="nixl", agent_name="x", metadata=b"", regions=(("kv", 0, 1 << 20),))
    peer = PeerInfo(
        worker_id=WorkerId("stranger"), incarnation=new_incarnation(), format=wrong, geometry=GEOMETRY, link=link
    )
    with pytest.raises(LayoutMismatch) as caught:
        await _handshake(cluster, peer)
    for factor in ("model_digest", "kv_dtype", "num_layers", "quantisation", "tokenizer_digest"):
        assert factor in caught.value.message, caught.value.message
    assert "head_dim" not in caught.value.message
    assert sys.intern("float16") in caught.value.message and "float32" in caught.value.message
