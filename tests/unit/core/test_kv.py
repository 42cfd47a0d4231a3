"""Formats, block hashes, block counts."""

import subprocess
import sys
from dataclasses import replace

from core.kv import BlockCounts, KVFormat, KVGeometry, hash_blocks

FORMAT = KVFormat(
    model_digest="m",
    tokenizer_digest="t",
    template_digest="c",
    compute_dtype="float32",
    kv_dtype="float32",
    quantisation="none",
    num_layers=2,
    num_kv_heads=3,
    head_dim=8,
)


def test_unequal_formats_have_unequal_hashes_and_name_what_differs() -> None:
    other = replace(FORMAT, kv_dtype="bfloat16")
    assert FORMAT.hash() == replace(FORMAT).hash()
    assert FORMAT.hash() != other.hash()
    assert FORMAT.differences(other) == ["kv_dtype: 'float32' != 'bfloat16'"]


def test_a_block_is_its_heads() -> None:
    geometry = KVGeometry(num_blocks=4, block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=4)
    assert geometry.block_bytes == 3 * 30 * 2 * 16 * 64 * 4 == 3 * geometry.head_bytes
    assert [geometry.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_block_hashes_chain_and_cover_complete_blocks_only() -> None:
    tokens = list(range(50))
    hashes = list(hash_blocks(tokens, 16))
    assert len(hashes) == 3
    assert list(hash_blocks(tokens[:48], 16)) == hashes
    changed = list(hash_blocks([7, *tokens[1:]], 16))
    assert all(mine != theirs for mine, theirs in zip(hashes, changed, strict=True))
    assert next(hash_blocks([*tokens[:16], 99, *tokens[17:]], 16)) == hashes[0]


def test_salt_and_adapter_part_the_chains() -> None:
    tokens = list(range(16))
    chains = {next(hash_blocks(tokens, 16, salt=salt, adapter=adapter)) for salt in ("", "a") for adapter in ("", "b")}
    assert len(chains) == 4


def test_block_hashes_are_equal_in_every_process() -> None:
    code = "from core.kv import hash_blocks; print(next(hash_blocks(range(16), 16)).hex())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == next(hash_blocks(range(16), 16)).hex()


def test_counts_must_add_up_and_promises_must_be_kept() -> None:
    counts = BlockCounts(total=10, custody=1, in_use=2, leased=3, cached=1, free=3, reserved=4)
    assert counts.is_conserved()
    assert not replace(counts, reserved=5).is_conserved()
    assert not replace(counts, free=2).is_conserved()
    assert not counts.is_idle()
