"""TCP proxies in front of the components of a process cluster: what a network can do to their connections.

A connection is between the component that dialled (told by which process owns the other end) and the one behind the
proxy. A loss takes the connections of one component, or of one pair, while it lasts; new ones meet it too::

    DROP       closed in good order; new ones are closed at once
    RESET      reset; new ones are reset
    BLACKHOLE  nothing moves, nobody is told; what was sent arrives when it is over, as TCP would send it again
    HALF_OPEN  the side that was dialled sees a reset, the dialler is told nothing, and what it sends goes nowhere: for
               ever, on connections of before; for new ones while it lasts
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from core.config import split_address

_CHUNK_BYTES = 65536
_NO_LINGER = struct.pack("ii", 1, 0)


class Loss(StrEnum):
    DROP = "drop"
    RESET = "reset"
    BLACKHOLE = "blackhole"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Cut:
    """A loss of one component (``other`` empty: of all its connections) or of one pair."""

    loss: Loss
    one: str
    other: str = ""

    def takes(self, dialler: str, dialled: str) -> bool:
        ends = {dialler, dialled}
        return self.one in ends and (not self.other or self.other in ends)


@dataclass(slots=True, eq=False)
class _Side:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if sock is not None and not self.writer.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


@dataclass(slots=True, eq=False)
class _Connection:
    dialler: str
    dialled: str
    near: _Side
    """The dialler's."""
    far: _Side | None = None
    moves: asyncio.Event = field(default_factory=asyncio.Event)
    is_swallowed: bool = False
    """What the dialler sends goes nowhere, and it hears nothing."""

    def suffer(self, loss: Loss) -> None:
        match loss:
            case Loss.BLACKHOLE:
                self.moves.clear()
            case Loss.HALF_OPEN:
                self.is_swallowed = True
                if self.far is not None:
                    self.far.reset()
            case Loss.RESET:
                self._each(_Side.reset)
            case Loss.DROP:
                self._each(_Side.close)

    def _each(self, end: Callable[[_Side], None]) -> None:
        end(self.near)
        if self.far is not None:
            end(self.far)


class Network:
    """``async with``: a proxy for each ``front``, until it is left. One loss at a time. Used on one event loop."""

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        """``pids`` of the components that run now, by name."""
        self._pids = pids
        self._cut: Cut | None = None
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.addresses: dict[str, str] = {}
        """Where a component is reached through its proxy."""
        self.num_hit = 0
        """Connections that the present loss has taken."""

    async def __aenter__(self) -> Network:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            connection.suffer(Loss.RESET)

    async def front(self, name: str, address: str) -> str:
        """A proxy before the component ``name`` that listens, now or later, at ``address``. Returns its own address."""

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(name, address, _Side(reader, writer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        self.addresses[name] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self.addresses[name]

    def cut(self, cut: Cut) -> None:
        """From now on, until ``heal``."""
        self._cut, self.num_hit = cut, 0
        for connection in list(self._connections):
            if cut.takes(connection.dialler, connection.dialled):
                self.num_hit += 1
                connection.suffer(cut.loss)

    def heal(self) -> None:
        self._cut = None
        for connection in self._connections:
            connection.moves.set()

    async def _serve(self, name: str, address: str, near: _Side) -> None:
        connection = _Connection(await self._owner(near), name, near)
        connection.moves.set()
        self._connections.add(connection)
        cut = self._cut
        if cut is not None and cut.takes(connection.dialler, name):
            self.num_hit += 1
            connection.suffer(cut.loss)
        pumps: list[asyncio.Task[None]] = []
        try:
            if not connection.is_swallowed:
                await connection.moves.wait()
                host, port = split_address(address)
                connection.far = _Side(*await asyncio.open_connection(host, port))
                pumps.append(asyncio.create_task(self._pump(connection, connection.far, near)))
                pumps.append(asyncio.create_task(self._pump(connection, near, connection.far)))
            else:
                pumps.append(asyncio.create_task(self._pump(connection, near, near)))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if connection.is_swallowed:
                await pumps[-1]  # until the dialler gives up
        except OSError:
            near.reset()  # nobody listens there
        finally:
            self._connections.discard(connection)
            for pump in pumps:
                pump.cancel()
            near.close()
            if connection.far is not None:
                connection.far.close()

    async def _pump(self, connection: _Connection, source: _Side, sink: _Side) -> None:
        try:
            while data := await source.reader.read(_CHUNK_BYTES):
                await connection.moves.wait()
                if not connection.is_swallowed:
                    sink.writer.write(data)
                    await sink.writer.drain()
        except OSError:
            pass  # the other pump, or whoever waits for us, ends the connection
        if not connection.is_swallowed:
            await connection.moves.wait()

    async def _owner(self, near: _Side) -> str:
        """The component whose socket is at the other end; empty for nobody of the cluster."""
        dialled_from = near.writer.get_extra_info("peername")[1]
        dialled_to = near.writer.get_extra_info("sockname")[1]
        return await asyncio.to_thread(_owner_of, dialled_from, dialled_to, self._pids())


def _owner_of(near_port: int, far_port: int, pids: dict[str, int]) -> str:
    """Which process has the end ``near_port`` of a connection on loopback."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = (f"{near_port:04X}", f"{far_port:04X}")
    inode = next((row[9] for row in rows if (row[1].split(":")[1], row[2].split(":")[1]) == ends), "")
    return next((name for name, pid in pids.items() if f"socket:[{inode}]" in _files_of(pid)), "")


def _files_of(pid: int) -> Iterator[str]:
    """What a process has open."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):  # it has just gone
        for number in os.listdir(folder):
            with suppress(OSError):  # that file has
                yield os.readlink(f"{folder}/{number}")
