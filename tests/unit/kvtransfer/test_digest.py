import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DigestMismatch
from core.handoff import DigestKind
from core.kv import KVGeometry
from kvtransfer.digest import Digester, DigestMemory, combine, verify, wsum64

GEOMETRY = KVGeometry(num_blocks=6, block_size=4, num_layers=2, num_kv_heads=3, head_dim=4, dtype_bytes=4)


def memory(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, GEOMETRY.num_blocks * GEOMETRY.block_bytes, dtype=np.uint8)


def by_definition(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % 2**64


@given(st.binary(min_size=1, max_size=200))
def test_wsum64_is_what_its_definition_says(data: bytes) -> None:
    assert int(wsum64(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0]) == by_definition(data)


@given(st.binary(min_size=8, max_size=64).filter(lambda b: len(b) % 8 == 0), st.integers(0, 511), st.integers(1, 255))
def test_every_changed_byte_changes_wsum64(data: bytes, where: int, mask: int) -> None:
    changed = bytearray(data)
    changed[where % len(data)] ^= mask
    assert by_definition(data) != by_definition(bytes(changed))


def test_digests_come_block_first_one_for_each_kv_head() -> None:
    kv = memory()
    digests = np.frombuffer(Digester(DigestKind.WSUM64, GEOMETRY, kv).digest([4, 1]), dtype="<u8").reshape(2, 3)
    heads = kv.reshape(GEOMETRY.num_blocks, GEOMETRY.num_kv_heads, GEOMETRY.head_bytes)
    assert int(digests[0, 2]) == by_definition(heads[4, 2].tobytes())
    assert int(digests[1, 0]) == by_definition(heads[1, 0].tobytes())


def test_crc32_and_off() -> None:
    kv = memory()
    heads = kv.reshape(GEOMETRY.num_blocks, GEOMETRY.num_kv_heads, GEOMETRY.head_bytes)
    crc = np.frombuffer(Digester(DigestKind.CRC32, GEOMETRY, kv).digest([3]), dtype="<u8")
    assert [int(value) for value in crc] == [zlib.crc32(heads[3, head].tobytes()) for head in range(3)]
    assert Digester(DigestKind.OFF, GEOMETRY, kv).digest([3]) == b""


@pytest.mark.parametrize("unit", ["words", "heads", "blocks"])
def test_reordering_is_seen(unit: str) -> None:
    kv = memory()
    digester = Digester(DigestKind.WSUM64, GEOMETRY, kv)
    before = digester.digest([0, 1])
    heads = kv.reshape(GEOMETRY.num_blocks, GEOMETRY.num_kv_heads, GEOMETRY.head_bytes)
    words = heads[0, 0].view("<u8")
    if unit == "words":
        words[[2, 5]] = words[[5, 2]]
    elif unit == "heads":
        heads[0, [0, 1]] = heads[0, [1, 0]]
    else:
        heads[[0, 1]] = heads[[1, 0]]
    with pytest.raises(DigestMismatch):
        verify(before, digester.digest([0, 1]), num_kv_heads=3)


def test_a_mismatch_names_block_and_head() -> None:
    kv = memory()
    digester = Digester(DigestKind.WSUM64, GEOMETRY, kv)
    before = digester.digest([2, 5])
    kv[5 * GEOMETRY.block_bytes + GEOMETRY.head_bytes + 7] ^= 1
    with pytest.raises(DigestMismatch, match=r"1 digests differ, first at block 1 of the hand-off, kv head 1"):
        verify(before, digester.digest([2, 5]), num_kv_heads=3)
    with pytest.raises(DigestMismatch, match=r"6 digests expected, 3 made"):
        verify(before, digester.digest([2]), num_kv_heads=3)


def test_the_digest_of_the_list_depends_on_kind_order_and_every_digest() -> None:
    first, second = b"\1" * 8, b"\2" * 8
    values = {
        combine(DigestKind.WSUM64, first + second),
        combine(DigestKind.WSUM64, second + first),
        combine(DigestKind.CRC32, first + second),
        combine(DigestKind.OFF, b""),
    }
    assert len(values) == 4


DIGESTER = Digester(DigestKind.WSUM64, GEOMETRY, memory())


def test_a_complete_block_is_digested_once_for_as_long_as_it_keeps_its_content() -> None:
    generations = [0] * GEOMETRY.num_blocks
    digests = DigestMemory(DIGESTER, lambda blocks: [generations[block] for block in blocks])
    first = digests.digest([3, 1, 4], num_complete=2)
    assert first == DIGESTER.digest([3, 1, 4]) and digests.num_made == 3
    assert digests.digest([1, 3, 4], num_complete=2) == DIGESTER.digest([1, 3, 4])
    assert digests.num_made == 4, "only the one that was not complete"
    assert digests.digest([3, 1], num_complete=2) == DIGESTER.digest([3, 1]) and digests.num_made == 4
    generations[3] += 1
    assert digests.digest([3, 1], num_complete=2) == DIGESTER.digest([3, 1]) and digests.num_made == 5


def test_a_block_that_is_given_out_anew_while_it_is_digested_is_not_remembered() -> None:
    numbers = iter([[0], [1], [1], [1]])
    digests = DigestMemory(DIGESTER, lambda blocks: next(numbers))
    digests.digest([3], num_complete=1)
    digests.digest([3], num_complete=1)
    assert digests.num_made == 2
