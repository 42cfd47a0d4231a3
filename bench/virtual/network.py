"""What lies between the processes: calls and streams, with the delays and failures of a network.

A *call* reaches whoever listens at the address now; it ends with the answer, with WorkerLost when the process is gone
or hangs for longer than keepalive allows, or with the caller's time. A *stream* delivers messages in order unless
``on_message`` decides otherwise: it answers with the delays at which a message arrives (none: it is lost, two: twice).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol

from bench.virtual.loop import Process
from core.errors import DeadlineExceeded, InternalError, ServingError, WorkerLost, error_from_slug
from core.ids import WorkerId
from core.types import WorkerAddress

LATENCY_S = 0.0005
KEEPALIVE_S = 2.0
"""A process that hangs for so long loses its connections."""

_END = object()


class Listener(Protocol):
    """A process that serves: calls reach methods of its ``role``."""

    @property
    def process(self) -> Process: ...
    @property
    def role(self) -> Any: ...
    @property
    def worker_id(self) -> WorkerId: ...


class Pipe:
    """One direction of a stream."""

    def __init__(self, network: Network, name: str, sender: Process, receiver: Process) -> None:
        self.name, self.sender, self.receiver = name, sender, receiver
        self._network = network
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._last_at = 0.0
        self.is_broken = False

    def send(self, message: Any) -> None:
        if self.is_broken:
            return
        loop = asyncio.get_running_loop()
        for arriving, delay_s in self._network.on_message(self, message):
            at = loop.time() + LATENCY_S + delay_s
            if delay_s == 0.0:  # in order, behind what was sent before
                at = self._last_at = max(at, self._last_at + 1e-9)  # timers of one moment have no order
            loop.call_at(at, self._queue.put_nowait, arriving, context=self.receiver.context.copy())

    def end(self, error: ServingError | None) -> None:
        """Nothing comes through any more; the reader finds out in a moment."""
        if not self.is_broken:
            self.is_broken = True
            loop = asyncio.get_running_loop()
            loop.call_later(LATENCY_S, self._queue.put_nowait, error or _END, context=self.receiver.context.copy())

    async def messages(self) -> AsyncIterator[Any]:
        while True:
            message = await self._queue.get()
            if message is _END:
                return
            if isinstance(message, ServingError):
                raise message
            yield message


class Connection:
    """Something that ends when one of its two processes does."""

    def __init__(self, client: Process, server: Process, on_break: Callable[[ServingError], None]) -> None:
        self.client, self.server, self.on_break = client, server, on_break


class Network:
    def __init__(self, find: Callable[[str], Listener | None]) -> None:
        """``find`` knows who listens at an address."""
        self._find = find
        self._connections: list[Connection] = []
        self.on_message: Callable[[Pipe, Any], list[tuple[Any, float]]] = lambda pipe, message: [(message, 0.0)]

    # -- faults -------------------------------------------------------------------------------------------------------

    def lose(self, process: Process) -> None:
        """The process is gone: its peers' kernels say so."""
        for connection in list(self._connections):
            if process in (connection.client, connection.server):
                self._break(connection, f"{process.name} is gone")

    def stop(self, process: Process) -> None:
        process.stop()
        asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keepalive, process)

    def _keepalive(self, process: Process) -> None:
        if process.is_stopped:
            for connection in list(self._connections):
                if process in (connection.client, connection.server):
                    self._break(connection, f"{process.name} does not answer")

    def break_streams(self, between: tuple[Process, Process]) -> None:
        for connection in list(self._connections):
            if {connection.client, connection.server} == set(between):
                self._break(connection, "the connection was reset")

    def _break(self, connection: Connection, why: str) -> None:
        self._connections.remove(connection)
        connection.on_break(WorkerLost(why))

    # -- calls --------------------------------------------------------------------------------------------------------

    async def call(
        self, caller: Process, to: WorkerAddress, method: str, request: Any, *, timeout_s: float = 5.0
    ) -> Any:
        """``method`` of the role of whoever listens there. Cancelling it cancels the handler."""
        loop = asyncio.get_running_loop()
        worker = self._find(to.address)
        if worker is None:
            await asyncio.sleep(LATENCY_S)
            raise WorkerLost(f"nobody listens at {to.address}", worker_id=to.worker_id)
        server = worker.process
        reply: asyncio.Future[Any] = loop.create_future()

        def answer(result: Any) -> None:
            if not reply.done():
                if isinstance(result, ServingError):
                    reply.set_exception(result)
                else:
                    reply.set_result(result)

        def deliver(result: Any) -> None:
            loop.call_later(LATENCY_S, answer, result, context=caller.context.copy())

        async def handle() -> None:
            try:
                deliver(await getattr(worker.role, method)(request))
            except ServingError as error:
                deliver(error_from_slug(error.slug, error.message, worker_id=error.worker_id))
            except Exception as error:  # noqa: BLE001 - as the interceptor of the product does
                loop.call_exception_handler({"message": f"{method} failed", "exception": error})
                deliver(InternalError(f"{method} failed", worker_id=to.worker_id))

        tasks: list[asyncio.Task[None]] = []
        loop.call_later(
            LATENCY_S,
            lambda: tasks.append(loop.create_task(handle(), name=method)),
            context=server.context.copy(),
        )
        connection = Connection(caller, server, lambda error: deliver(_lost(error, to)))
        self._connections.append(connection)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(f"{to.worker_id} did not answer in time") from None
        finally:
            if connection in self._connections:
                self._connections.remove(connection)
            if not reply.done() or reply.cancelled():

                def cancel() -> None:
                    for task in tasks:
                        task.cancel()

                loop.call_later(2 * LATENCY_S, cancel, context=server.context.copy())

    # -- streams ------------------------------------------------------------------------------------------------------

    async def stream(
        self,
        caller: Process,
        to: WorkerAddress,
        open_stream: Callable[[Any, AsyncIterator[Any]], Any],
        messages: AsyncIterator[Any] | None,
        name: str,
    ) -> AsyncIterator[Any]:
        """Both directions of a long-lived stream, seen from the caller. Ends by a typed error, or when the server
        ends it."""
        worker = self._find(to.address)
        if worker is None:
            await asyncio.sleep(LATENCY_S)
            raise WorkerLost(f"nobody listens at {to.address}", worker_id=to.worker_id)
        server = worker.process
        there, back = Pipe(self, f"{name}>", caller, server), Pipe(self, f"{name}<", server, caller)
        serving: list[asyncio.Task[None]] = []

        async def serve() -> None:
            error: ServingError | None = None
            try:
                async with aclosing(open_stream(worker, there.messages())) as replies:
                    async for reply in replies:
                        back.send(reply)
            except ServingError as failure:
                error = error_from_slug(failure.slug, failure.message, worker_id=failure.worker_id)
            finally:
                back.end(error)

        def on_break(error: ServingError) -> None:
            there.is_broken = True
            back.end(_lost(error, to))
            loop.call_later(LATENCY_S, _cancel_all, serving, context=server.context.copy())

        async def pump(source: AsyncIterator[Any]) -> None:
            async for message in source:
                there.send(message)

        loop = asyncio.get_running_loop()
        serving.append(server.spawn(serve(), name=name))
        connection = Connection(caller, server, on_break)
        self._connections.append(connection)
        pumping = None if messages is None else loop.create_task(pump(messages), name=f"{name}-pump")
        try:
            async for message in back.messages():
                yield message
        finally:
            if connection in self._connections:
                self._break(connection, "the caller has gone")
            if pumping is not None:
                pumping.cancel()
                with suppress(asyncio.CancelledError):
                    await pumping


def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _lost(error: ServingError, to: WorkerAddress) -> WorkerLost:
    return WorkerLost(error.message, worker_id=to.worker_id)


class HandoffWire:
    """D's end of a control stream: what ``rpc.clients.HandoffClient`` is in the product."""

    def __init__(self, network: Network, caller: Listener, to: WorkerAddress) -> None:
        self._network, self._caller, self._to = network, caller, to

    def connect(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        name = f"handoff {self._caller.worker_id} {self._to.worker_id}"
        return self._network.stream(
            self._caller.process, self._to, lambda worker, inner: worker.role.connect(inner), messages, name
        )

    async def close(self) -> None:
        pass


class WorkerClients:
    """The gateway's client factory."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def prefill(self, worker: WorkerAddress) -> PrefillWire:
        return PrefillWire(self._network, self._process, worker)

    def decode(self, worker: WorkerAddress) -> DecodeWire:
        return DecodeWire(self._network, self._process, worker)


class PrefillWire:
    def __init__(self, network: Network, process: Process, to: WorkerAddress) -> None:
        self._to = to
        self._call: Callable[..., Coroutine[Any, Any, Any]] = lambda method, request, **options: network.call(
            process, to, method, request, **options
        )

    async def prefill(self, request: Any) -> Any:
        return await self._call("prefill", request, timeout_s=request.request.deadline_s)

    async def abort(self, request: Any) -> Any:
        return await self._call("abort_prefill", request)

    async def close(self) -> None:
        pass


class DecodeWire:
    def __init__(self, network: Network, process: Process, to: WorkerAddress) -> None:
        self._network, self._process, self._to = network, process, to

    async def admit(self, request: Any) -> Any:
        timeout_s = min(5.0, request.request.deadline_s)
        return await self._network.call(self._process, self._to, "admit", request, timeout_s=timeout_s)

    async def abort(self, request: Any) -> Any:
        return await self._network.call(self._process, self._to, "abort_decode", request)

    async def follow_outputs(self, gateway_id: Any, incarnation: Any, take: Callable[[Any], None]) -> None:
        async for message in self.outputs(gateway_id, incarnation):
            take(message)

    def outputs(self, gateway_id: Any, incarnation: Any) -> AsyncIterator[Any]:
        def open_stream(worker: Any, inner: AsyncIterator[Any]) -> Any:
            return worker.role.outputs(gateway_id, incarnation, self._to.incarnation)

        return self._network.stream(self._process, self._to, open_stream, None, f"outputs {self._to.worker_id}")

    async def close(self) -> None:
        pass
