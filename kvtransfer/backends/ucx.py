"""What UCX does behind NIXL's back, seen from outside: whether bytes came through its TCP sockets, and why cma is not
used. NIXL tells neither, and names of configured transports prove nothing: what counts is where the bytes went.

Linux only; elsewhere nothing is seen, and links pass for what they declare.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]

_TCP_LISTEN = 10
_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in ``struct tcp_info`` (Linux 4.1 and later)."""


def listeners() -> frozenset[Address]:
    """Addresses at which this process listens."""
    return frozenset(own for own, _, info in _tcp_sockets() if info[0] == _TCP_LISTEN)


def bytes_received(*, theirs: frozenset[Address], ours: frozenset[Address]) -> int:
    """So far, over connections of this process to ``theirs``, or that were made to ``ours``."""
    return sum(
        struct.unpack_from("<Q", info, _BYTES_RECEIVED)[0]
        for own, peer, info in _tcp_sockets()
        if info[0] != _TCP_LISTEN and len(info) >= _BYTES_RECEIVED + 8 and (peer in theirs or own in ours)
    )


def _tcp_sockets() -> Iterator[tuple[Address, Address | None, bytes]]:
    """(own address, peer's address, ``tcp_info``) of each TCP socket of this process, whoever opened it."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile, or no socket
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                peer = None if info[0] == _TCP_LISTEN else sock.getpeername()[:2]
                yield sock.getsockname()[:2], peer, info


def host() -> str:
    """Equal for two processes that could reach each other's memory through the kernel: same boot, same pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def why_no_cma(pid: int, address: int) -> str:
    """What the kernel says to a read of that process's memory as cma would make it; empty when it is allowed."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    target = ctypes.create_string_buffer(8)
    mine, theirs = Vector(ctypes.addressof(target), 8), Vector(address, 8)
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return "this system has no process_vm_readv"
    read.restype = ctypes.c_ssize_t
    if (
        read(pid, ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0))
        >= 0
    ):
        return ""
    return os.strerror(ctypes.get_errno())
