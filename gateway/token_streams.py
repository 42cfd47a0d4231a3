"""The token streams: one multiplexed Outputs stream for each decode worker incarnation, shared by all requests.

    opening --first message--> open --error or end--> broken (forgotten; its requests fail with that error)
       '------------ error, or no first message within `open_timeout_s` ------------^

A stream that breaks fails every attempt on it at once: no attempt waits for a peer that is gone. The next attempt on
the same worker opens a new stream (and, if the worker restarted, meets a new incarnation).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from core import types as t
from core.clock import Clock
from core.errors import ServingError, WorkerLost, error_from_slug
from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from core.tasks import TaskScope
from gateway.ports import ClientFactory, DecodePort

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
MAX_TOMBSTONES = 8192

Event = t.TokenChunk | t.AttemptAccepted | t.AdmitReply | t.PrefillReply | ServingError
AttemptKey = tuple[RequestId, int]
Handler = Callable[[Event], None]
"""Takes what happens to one attempt, in order. It raises nothing."""
TakeToken = Callable[[int, int, float], None]
"""Takes a plain token of one choice: index, token id, when its message came. It raises nothing."""


class DecodeLink:
    """This gateway's client and stream to one decode worker incarnation."""

    def __init__(self, worker: t.WorkerAddress, client: DecodePort, keys: Iterator[int], clock: Clock) -> None:
        """``keys`` are never given twice by this gateway: an old attempt's token must not reach a new one."""
        self.worker = worker
        self._keys = keys
        self._clock = clock
        self._takers: dict[int, TakeToken] = {}
        self._names: dict[AttemptKey, list[int]] = {}
        self.client = client
        self._handlers: dict[AttemptKey, Handler] = {}
        self._tombstones: OrderedDict[AttemptKey, None] = OrderedDict()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting when the stream breaks; the error reaches whoever asks next.
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())

    async def ready(self) -> None:
        """Returns when the worker has registered the stream. Raises what broke it."""
        await asyncio.shield(self._opened)

    def subscribe(self, request_id: RequestId, attempt: int, handler: Handler) -> None:
        self._handlers[request_id, attempt] = handler

    def name(self, request_id: RequestId, attempt: int, takers: Sequence[TakeToken]) -> int:
        """The stream key of a subscribed attempt: plain tokens of each of its choices go to its taker."""
        names = [next(self._keys) for _ in takers]
        self._names[request_id, attempt] = names
        self._takers |= zip(names, takers, strict=True)
        return names[0]

    def unsubscribe(self, request_id: RequestId, attempt: int) -> None:
        self._handlers.pop((request_id, attempt), None)
        for name in self._names.pop((request_id, attempt), ()):
            del self._takers[name]
        self._bury((request_id, attempt))

    async def read(
        self, gateway_id: GatewayId, incarnation: Incarnation, on_unknown: Callable[[AttemptKey], None]
    ) -> None:
        """Reads the stream until it breaks; always raises. `on_unknown` hears once of attempts nobody waits for."""
        async with asyncio.timeout(OPEN_TIMEOUT_S) as opening:

            def take(message: t.StepOutputs) -> None:
                if not self._opened.done():
                    opening.reschedule(None)
                    self._opened.set_result(None)
                self._deliver(message, on_unknown)

            await self.client.follow_outputs(gateway_id, incarnation, take)
        raise WorkerLost(f"{self.worker.worker_id} ended its token stream", worker_id=self.worker.worker_id)

    def fail(self, error: ServingError) -> None:
        """Every attempt on this link has failed."""
        if not self._opened.done():
            self._opened.set_exception(error)
        for handler in self._handlers.values():
            handler(error)
        self._handlers.clear()

    def _deliver(self, message: t.StepOutputs, on_unknown: Callable[[AttemptKey], None]) -> None:
        plain = message.plain
        if plain is not None:
            takers, now = self._takers, self._clock.now()
            for key, index, token_id in zip(plain.keys, plain.indexes, plain.token_ids, strict=True):
                taker = takers.get(key)
                if taker is not None:
                    taker(index, token_id, now)
        for accepted in message.accepted:
            self._hand_over((accepted.request_id, accepted.attempt), accepted, on_unknown)
        for chunk in message.chunks:
            self._hand_over((chunk.request_id, chunk.attempt), chunk, on_unknown)
        for failed in message.failed:
            self._hand_over((failed.request_id, failed.attempt), self._failure(failed), on_unknown)

    def _hand_over(self, key: AttemptKey, event: Event, on_unknown: Callable[[AttemptKey], None]) -> None:
        handler = self._handlers.get(key)
        if handler is not None:
            handler(event)
        elif key not in self._tombstones:
            self._bury(key)
            on_unknown(key)

    def _failure(self, failed: t.AttemptFailed) -> ServingError:
        return error_from_slug(failed.slug, failed.message, worker_id=failed.worker_id or self.worker.worker_id)

    def _bury(self, key: AttemptKey) -> None:
        self._tombstones[key] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


class TokenStreams:
    """All links of this gateway, by worker incarnation."""

    def __init__(self, clients: ClientFactory, gateway_id: GatewayId, incarnation: Incarnation, clock: Clock) -> None:
        """``clock`` is that of the requests' stages."""
        self._clients = clients
        self._clock = clock
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._links: dict[tuple[WorkerId, Incarnation], DecodeLink] = {}
        self._keys = count(1)
        self._scope = TaskScope("token-streams")

    def link(self, worker: t.WorkerAddress) -> DecodeLink:
        """The link to this incarnation; its stream is opened at the first call. Await `ready()` before admitting."""
        key = (worker.worker_id, worker.incarnation)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = DecodeLink(worker, self._clients.decode(worker), self._keys, self._clock)
            self._scope.spawn(self._run(link), name=worker.worker_id)
        return link

    async def close(self) -> None:
        await self._scope.close()

    async def _run(self, link: DecodeLink) -> None:
        worker = link.worker
        error: ServingError = WorkerLost("this gateway is stopping", worker_id=worker.worker_id)
        try:
            await link.read(self._gateway_id, self._incarnation, lambda key: self._abort_unknown(link, key))
        except TimeoutError:
            error = WorkerLost(f"{worker.worker_id} did not open a token stream", worker_id=worker.worker_id)
        except ServingError as reason:
            error = reason
        finally:
            self._links.pop((worker.worker_id, worker.incarnation), None)
            link.fail(error)
            await link.client.close()
        log.warning(
            "token stream broke", extra={"worker": worker.worker_id, "slug": error.slug, "reason": error.message}
        )

    def _abort_unknown(self, link: DecodeLink, key: AttemptKey) -> None:
        request_id, attempt = key
        self._scope.spawn(self._abort(link, request_id, attempt), name=f"abort-{request_id}")

    async def _abort(self, link: DecodeLink, request_id: RequestId, attempt: int) -> None:
        try:
            await link.client.abort(t.AbortRequest(request_id=request_id, attempt=attempt, reason="unknown"))
        except ServingError as error:
            log.debug("abort failed", extra={"request_id": request_id, "slug": error.slug})
