"""Memory that is touched before it is used: all of it, without changing it, and not at the cost of others."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from engine import prefault
from engine.prefault import MemoryLeft, Prefault, memory_left

NUM_BYTES = 5 * prefault.PIECE_BYTES + mmap.PAGESIZE
PLENTY = MemoryLeft(available_bytes=10, total_bytes=10)


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _resident_bytes(memory: mmap.mmap) -> int:
    """Of the mapping, as the kernel says."""
    start = f"{_address(memory):x}-"
    with open("/proc/self/smaps") as lines:
        is_ours = False
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                is_ours = line.startswith(start)
            elif is_ours and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    raise AssertionError("the mapping is not there")


def _touch(memory: mmap.mmap, **options: object) -> Prefault:
    touching = Prefault(memory, _address(memory), **options)  # type: ignore[arg-type]
    touching.start()
    touching._thread.join(60)
    assert not touching._thread.is_alive()
    return touching


def test_every_page_is_had_and_no_byte_changes(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "PAUSE_S", 0.0)
    memory[mmap.PAGESIZE : mmap.PAGESIZE + 5] = b"baton"
    touching = _touch(memory, left=lambda: PLENTY)
    assert touching.touched_bytes == NUM_BYTES and _resident_bytes(memory) >= NUM_BYTES
    assert memory[mmap.PAGESIZE : mmap.PAGESIZE + 5] == b"baton" and not any(memory[:: mmap.PAGESIZE // 2][3:])


@pytest.mark.parametrize("left", [None, MemoryLeft(available_bytes=4, total_bytes=10)])
def test_where_memory_is_short_or_nobody_knows_nothing_is_touched(memory: mmap.mmap, left: MemoryLeft | None) -> None:
    assert _touch(memory, left=lambda: left).touched_bytes == 0


def test_a_kernel_that_cannot_leaves_it_to_use(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 9999)
    assert _touch(memory, left=lambda: PLENTY).touched_bytes == 0


def test_it_ends_when_it_is_told_to(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "PAUSE_S", 600.0)
    touching = Prefault(memory, _address(memory), left=lambda: PLENTY)
    touching.stop()  # before it began: nothing to wait for
    touching = Prefault(memory, _address(memory), left=lambda: PLENTY)
    touching.start()
    stopping = threading.Thread(target=touching.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive() and touching.touched_bytes < NUM_BYTES


def test_what_is_left_of_this_machine_is_known() -> None:
    left = memory_left()
    assert left is not None and 0 < left.available_bytes <= left.total_bytes
