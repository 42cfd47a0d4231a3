"""What KV blocks are: their format, their geometry, their hashes. No torch, no transport."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from core.ids import BlockHash

KV_PROTOCOL = 1
"""Version of the hand-off contract. Part of the format hash: unequal versions never pair."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """What two workers must have in common before one may read the other's KV (design.md 4). Hashed.

    The router pairs equal hashes of one model name only; the handshake compares again and names the differing factor.
    """

    model_digest: str
    tokenizer_digest: str
    template_digest: str
    compute_dtype: str
    kv_dtype: str
    quantisation: str
    num_layers: int
    num_kv_heads: int
    """All KV heads of the model, not those of one rank."""
    head_dim: int
    protocol: int = KV_PROTOCOL

    def hash(self) -> str:
        """64 hex digits; equal formats have equal hashes in every process."""
        text = "\n".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: "KVFormat") -> list[str]:
        """One ``factor: mine != theirs`` for each factor that differs."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name}: {mine!r} != {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


class KVOrder(StrEnum):
    """Memory order of a rank's KV, outermost dimension first. Declared data: the planner assumes none of them.

    Nothing lies between the elements, so order and sizes give the strides (:attr:`KVGeometry.strides`).
    """

    BLOCK_HEAD_LAYER = "block,kv_head,layer,kv,slot,head_dim"
    """What our engine has: a block is one contiguous range, and so is a head of a block."""
    LAYER_BLOCK_HEAD = "layer,kv,block,kv_head,slot,head_dim"
    """A tensor for each layer ("HND"): a block is one range for each layer, K and V."""
    LAYER_BLOCK_SLOT = "layer,kv,block,slot,kv_head,head_dim"
    """A tensor for each layer ("NHD"): the heads of a token lie together, a head of a block does not."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        return tuple(self.value.split(","))


class KVStrides(NamedTuple):
    """Bytes from one element of a dimension to the next."""

    block: int
    kv_head: int
    layer: int
    kv: int
    slot: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """How one rank of a worker lays KV out in its memory. Not hashed: the planner resolves unequal geometries.

    A rank holds a box of the model: ``kv_head_range(rank, num_ranks, ...)`` times ``num_layers`` layers from
    ``first_layer`` on.
    """

    num_blocks: int
    block_size: int
    """Tokens of one block."""
    num_layers: int
    """Layers that this rank holds."""
    num_kv_heads: int
    """KV heads that *this rank* holds, on the wire too. Those of the model are ``KVFormat.num_kv_heads``."""
    head_dim: int
    dtype_bytes: int
    rank: int = 0
    """Tensor-parallel rank."""
    num_ranks: int = 1
    first_layer: int = 0
    """Of the model's layers; not 0 in the later stages of a pipeline."""
    order: KVOrder = KVOrder.BLOCK_HEAD_LAYER

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one block: all layers, K and V. Contiguous in ``BLOCK_HEAD_LAYER``."""
        return self.num_layers * 2 * self.block_size * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all heads, all layers, K and V. One contiguous range in ``BLOCK_HEAD_LAYER``."""
        return self.num_kv_heads * self.head_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def strides(self) -> KVStrides:
        sizes = {
            "block": self.num_blocks,
            "kv_head": self.num_kv_heads,
            "layer": self.num_layers,
            "kv": 2,
            "slot": self.block_size,
            "head_dim": self.head_dim,
        }
        strides, stride = {}, self.dtype_bytes
        for dimension in reversed(self.order.dimensions):
            strides[dimension] = stride
            stride *= sizes[dimension]
        return KVStrides(**strides)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


def kv_head_range(rank: int, num_ranks: int, num_kv_heads: int) -> range:
    """The KV heads of the model that a tensor-parallel rank holds. ``num_kv_heads`` are *all* heads of the model.

    As even as it goes; where there are more ranks than heads each rank holds one, and neighbours hold copies of the
    same. A rule of the hand-off contract: both sides of a pair derive each other's heads from it.
    """
    first = rank * num_kv_heads // num_ranks
    return range(first, max(first + 1, (rank + 1) * num_kv_heads // num_ranks))


def ranks_with_kv_head(kv_head: int, num_ranks: int, num_kv_heads: int) -> range:
    """The ranks that hold a KV head: the inverse of :func:`kv_head_range`. More than one where heads are replicated."""
    last = -(-(kv_head + 1) * num_ranks // num_kv_heads) - 1
    return range(min(last, -(-kv_head * num_ranks // num_kv_heads)), last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """A contiguous range that a transfer backend may register. ``device`` is ``cpu`` or ``cuda:N``."""

    name: str
    address: int
    num_bytes: int
    device: str = "cpu"


def hash_blocks(
    token_ids: Sequence[int], block_size: int, *, salt: str = "", adapter: str = "", known: Sequence[BlockHash] = ()
) -> Iterator[BlockHash]:
    """Chained hashes of the complete blocks of ``token_ids``, equal in every process that sees the same tokens.

    Each hash covers its block's tokens and its parent's hash; the chain starts from salt (of the authenticated tenant)
    and adapter. Never Python's ``hash()``: that is seeded per process. 16 bytes each (BLAKE2b, RFC 7693).
    ``known`` are the hashes of the first blocks, if the caller has them: those behind them are made.
    """
    parent = known[-1] if known else hashlib.blake2b(f"{salt}\0{adapter}".encode(), digest_size=16).digest()
    first = len(known) * block_size
    last = len(token_ids) // block_size * block_size
    words = struct.pack(f"<{max(0, last - first)}I", *token_ids[first:last])
    for start in range(0, len(words), 4 * block_size):
        block = words[start : start + 4 * block_size]
        parent = hashlib.blake2b(block, key=parent, digest_size=16).digest()
        yield BlockHash(parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Law 1: every block counts once, as the first of custody > in use > leased > cached > free that applies.

    ``reserved`` is a promise on top (reserved <= free + evictable), not a sixth kind.
    """

    total: int
    custody: int
    in_use: int
    leased: int
    cached: int
    free: int
    reserved: int = 0

    def is_conserved(self) -> bool:
        """The five kinds add up to the pool and the promises can be kept."""
        kinds = self.custody + self.in_use + self.leased + self.cached + self.free
        return kinds == self.total and self.reserved <= self.free + self.cached

    def is_idle(self) -> bool:
        """Nothing is held by anybody (law 2)."""
        return self.custody == self.in_use == self.leased == self.reserved == 0
