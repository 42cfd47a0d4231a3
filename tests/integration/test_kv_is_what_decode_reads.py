"""The KV that moved is what D computes with: a flipped byte changes the logits, and with digests it is caught and
mended."""

from dataclasses import dataclass

import pytest

from core.handoff import HandoffOutcome, LinkInfo, PeerInfo
from engine.engine import Engine
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Batch, Identity, Link, Op, OpState, OpStatus
from kvtransfer.backends.inproc import Fabric
from kvtransfer.layout import Region
from kvtransfer.memory import REGION_KV, view_memory
from tests.support.local_cluster import LocalCluster

PROMPT = "The capital of France is a city that"
EXPONENT_BYTE = 3
"""Of a little-endian float32: flipping a high bit there is not lost in rounding."""
pytestmark = pytest.mark.timeout(300)


@dataclass
class Corruption:
    """Flips one byte of the KV that the next ``times`` fetches bring."""

    times: int = 0
    done: int = 0


class CorruptingBackend:
    """A real backend whose bytes get damaged on the way: after they arrived, before anybody is told so."""

    def __init__(self, inner: Backend, corruption: Corruption) -> None:
        self._inner = inner
        self._corruption = corruption
        self._kv_address = 0
        self._batches: dict[int, Batch] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def socket_bytes(self, link: Link) -> int:
        return self._inner.socket_bytes(link)

    def lane(self, link: Link) -> str:
        return self._inner.lane(link)

    def explain(self, link: Link) -> str:
        return self._inner.explain(link)

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        self._kv_address = next(r.memory.address for r in regions if r.memory.name == REGION_KV)
        return self._inner.open(identity, regions)

    def connect(self, peer: PeerInfo) -> Link:
        return self._inner.connect(peer)

    def post(self, link: Link, batch: Batch) -> Op:
        op = self._inner.post(link, batch)
        if batch.local_region == REGION_KV:
            self._batches[id(op)] = batch
        return op

    def poll(self, op: Op) -> OpStatus:
        status = self._inner.poll(op)
        if status.state is OpState.DONE and (batch := self._batches.pop(id(op), None)) and self._corruption.times > 0:
            self._corruption.times -= 1
            self._corruption.done += 1
            address = self._kv_address + batch.copies[0].local_offset + EXPONENT_BYTE
            view_memory(address, 1)[0] ^= 0x20
        return status

    def abort(self, link: Link) -> bool:
        return self._inner.abort(link)

    def disconnect(self, link: Link) -> None:
        self._inner.disconnect(link)

    def close(self) -> bool:
        return self._inner.close()


def _logprobs(answer: dict[str, object]) -> list[float]:
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]  # type: ignore[index]
    return list(logprobs)


@pytest.mark.parametrize("backend", ["nixl", "tcp", "dist", "inproc"])
async def test_without_digests_a_flipped_byte_changes_the_logits(engines: dict[str, Engine], backend: str) -> None:
    fabric, corruption = Fabric(), Corruption()

    def make(worker_id: str) -> Backend:
        return CorruptingBackend(create_backend(backend, fabric=fabric), corruption)

    settings = (f"transfer.backend={backend}", "transfer.digest=off")
    async with LocalCluster(make, *settings, engines=engines) as cluster:
        clean = await cluster.complete(PROMPT, max_tokens=8, logprobs=1)
        again = await cluster.complete(PROMPT, max_tokens=8, logprobs=1)
        corruption.times = 1
        damaged = await cluster.complete(PROMPT, max_tokens=8, logprobs=1)
    assert corruption.done == 1
    assert _logprobs(again) == _logprobs(clean), "undamaged answers are bitwise equal"
    assert _logprobs(damaged)[0] == _logprobs(clean)[0], "the first token comes from P"
    assert _logprobs(damaged)[1:] != _logprobs(clean)[1:], "D computes with the KV that was moved"


@pytest.mark.parametrize("backend", ["nixl", "inproc"])
@pytest.mark.parametrize("digest", ["wsum64", "crc32"])
async def test_with_digests_it_is_caught_and_the_answer_is_right(
    engines: dict[str, Engine], backend: str, digest: str
) -> None:
    fabric, corruption = Fabric(), Corruption()

    def make(worker_id: str) -> Backend:
        return CorruptingBackend(create_backend(backend, fabric=fabric), corruption)

    settings = (f"transfer.backend={backend}", f"transfer.digest={digest}")
    async with LocalCluster(make, *settings, engines=engines) as cluster:
        clean = await cluster.complete(PROMPT, max_tokens=8)
        corruption.times = 1
        mended = await cluster.complete(PROMPT, max_tokens=8)
        role = cluster.workers["prefill-0"].role
        outcomes = role.exports.outcomes  # type: ignore[attr-defined]
    assert corruption.done == 1
    assert mended["choices"][0]["token_ids"] == clean["choices"][0]["token_ids"]
    assert outcomes[HandoffOutcome.DIGEST_MISMATCH] == 1, "P was told why the claim ended"
