"""``python -m baton.process`` whose hand-off streams lose, double, delay and reorder messages, and that writes down the
trace context of what it is asked.

Both only in the directory named by the environment variable ``MANGLED``: the file ``odds`` (JSON: drop, double, late,
swap) turns the mangling on while it is there, ``seen.jsonl`` is what came by. Nothing else differs from the product.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import rpc.clients
import rpc.server
from baton.process import main
from core.handoff import ToHolder, ToReader

FOLDER = Path(os.environ["MANGLED"])
_LATE_S = 0.3
_END = object()
_CHOOSE = random.Random(4)
_PROCESS = sys.argv[sys.argv.index("--worker-id") + 1] if "--worker-id" in sys.argv else sys.argv[1]
_connect = rpc.clients.HandoffClient.connect
_from_pb = rpc.server.from_pb


def odds() -> dict[str, float]:
    try:
        found: dict[str, float] = json.loads((FOLDER / "odds").read_text())
    except FileNotFoundError:
        return {}
    return found


def write_down(kind: str, fate: str, traceparent: str) -> None:
    line = {"process": _PROCESS, "kind": kind, "fate": fate, "traceparent": traceparent}
    with (FOLDER / "seen.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")  # one write below the size of a pipe: lines of processes do not mix


class Mangler:
    """One direction of a stream."""

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._swapped: list[Any] = []

    async def messages(self) -> AsyncIterator[Any]:
        pump = asyncio.create_task(self._pump())
        try:
            while (message := await self._arrived.get()) is not _END:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            pump.cancel()

    async def _pump(self) -> None:
        try:
            async for message in self._source:
                self._take(message)
            self._arrived.put_nowait(_END)
        except Exception as error:
            self._arrived.put_nowait(error)

    def _take(self, message: Any) -> None:
        fate = self._fate()
        write_down(type(message).__name__, fate, getattr(message, "traceparent", ""))
        if fate == "swap":
            self._swapped.append(message)
            return
        if fate == "late":
            asyncio.get_running_loop().call_later(_LATE_S, self._arrived.put_nowait, message)
        elif fate != "drop":
            for _ in range(2 if fate == "double" else 1):
                self._arrived.put_nowait(message)
        for held in self._swapped:
            self._arrived.put_nowait(held)
        self._swapped.clear()

    def _fate(self) -> str:
        draw = _CHOOSE.random()
        for fate, share in odds().items():
            if draw < share:
                return fate
            draw -= share
        return ""


async def connect(self: rpc.clients.HandoffClient, messages: AsyncIterator[ToHolder]) -> AsyncIterator[ToReader]:
    replies = _connect(self, Mangler(messages).messages())
    async for reply in Mangler(replies).messages():
        yield reply


def from_pb(cls: Any, message: Any) -> Any:
    decoded = _from_pb(cls, message)
    asked = getattr(decoded, "request", decoded)
    if hasattr(asked, "traceparent"):
        write_down(cls.__name__, "", asked.traceparent)
    return decoded


if __name__ == "__main__":
    rpc.clients.HandoffClient.connect = connect  # type: ignore[method-assign]
    rpc.server.from_pb = from_pb  # type: ignore[attr-defined]
    sys.exit(main())
