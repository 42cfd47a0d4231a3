"""Touches memory before somebody waits for it.

The first write to a page costs far more than the write: the kernel finds and clears it, and in a virtual machine its
host does too. A transfer into untouched blocks pays for all of it inside the kernel's copy (measured: 55 to 69 ms for
21 MB, instead of 3.3). So a thread of the lowest priority goes through the memory once, from its start on, a little
at a time. Contents do not change, so others may use the memory meanwhile.

It stops early where the machine (or the control group) would have less than half of its memory left: what is not
touched is had page by page on use, as ever.
"""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""Touched by one call: others that map memory wait for so long."""
PIECES = 4
PAUSE_S = 0.1
"""After so many pieces: at most 80 MB a second, some percent of a core."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not among the constants of ``mmap``
_NICEST = 19


class MemoryLeft(NamedTuple):
    available_bytes: int
    total_bytes: int


class Prefault:
    """Of one anonymous mapping. ``stop`` before it is unmapped."""

    def __init__(self, memory: mmap.mmap, address: int, *, left: Callable[[], MemoryLeft | None] | None = None) -> None:
        self._memory = memory  # kept mapped for as long as this lives
        self._address, self._num_bytes = address, len(memory)
        self._left = left or memory_left
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-prefault", daemon=True)
        self.touched_bytes = 0
        """From the start of the memory on. By us: what is used is touched too."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)  # of this thread alone
        while self.touched_bytes < self._num_bytes:
            left = self._left()
            if left is None or left.available_bytes < left.total_bytes // 2:
                log.info("the rest of the KV memory is touched on use", extra={"touched_bytes": self.touched_bytes})
                return
            for _ in range(PIECES):
                if self._stopping.is_set() or not self._touch():
                    return
            self._stopping.wait(PAUSE_S)

    def _touch(self) -> bool:
        """The next piece. False when there is none, or the kernel cannot."""
        size = min(PIECE_BYTES, self._num_bytes - self.touched_bytes)
        if not size:
            return False
        if _madvise(self._address + self.touched_bytes, size, _MADV_POPULATE_WRITE) != 0:
            log.info("the KV memory is touched on use", extra={"reason": os.strerror(ctypes.get_errno())})
            return False
        self.touched_bytes += size
        return True


def memory_left() -> MemoryLeft | None:
    """Of the machine, or of the control group where that is less. None where it cannot be known."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no limit says "max"
        return MemoryLeft(available, total)
    return MemoryLeft(min(available, limit - used), min(total, limit))


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    try:
        call = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):
        ctypes.set_errno(38)  # ENOSYS
        return -1
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    result: int = call(address, num_bytes, advice)
    return result
