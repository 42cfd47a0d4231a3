"""What KV blocks are: their format, their geometry, their hashes. No torch, no transport."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

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
    """Memory order of the KV tensor. Declared data: the planner must not assume it."""

    BLOCK_HEAD_LAYER = "block,kv_head,layer,kv,slot,head_dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """How one worker lays KV out in its memory. Not hashed: the planner resolves unequal geometries."""

    num_blocks: int
    block_size: int
    """Tokens of one block."""
    num_layers: int
    num_kv_heads: int
    """KV heads that this rank holds."""
    head_dim: int
    dtype_bytes: int
    rank: int = 0
    num_ranks: int = 1
    order: KVOrder = KVOrder.BLOCK_HEAD_LAYER

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one block: all layers, K and V. Contiguous in ``BLOCK_HEAD_LAYER``."""
        return self.num_layers * 2 * self.block_size * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all heads, all layers, K and V. One contiguous range in ``BLOCK_HEAD_LAYER``."""
        return self.num_kv_heads * self.head_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


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
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent = hashlib.blake2b(struct.pack(f"<{block_size}I", *block), key=parent, digest_size=16).digest()
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
