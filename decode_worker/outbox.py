"""Token streaming: one outbox for each gateway, one message for each step, whatever is pending coalesced.

The step loop never waits for a reader: it hands results over and goes on. While a gateway is behind, chunks of the same
choice are merged, so what is pending is bounded by the answers themselves. Tokens that are nothing but tokens are
columns; those of a choice that has a chunk waiting join it, because chunks are read after the columns.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from core.ids import GatewayId, Incarnation, RequestId
from core.types import AttemptAccepted, AttemptFailed, PlainTokens, StepOutputs, TokenChunk

ChoiceKey = tuple[RequestId, int, int]
"""(request, attempt, choice)."""


class Outbox:
    """What one incarnation of a gateway has still to be told. Used on the event loop only."""

    def __init__(self, gateway_id: GatewayId, incarnation: Incarnation) -> None:
        self.gateway_id = gateway_id
        self.incarnation = incarnation
        self._chunks: dict[ChoiceKey, TokenChunk] = {}
        self._failed: list[AttemptFailed] = []
        self._accepted: list[AttemptAccepted] = []
        self._keys: list[int] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self._since: float | None = None
        self._ended: dict[ChoiceKey, float] = {}
        """Of choices whose last chunk waits: the end of the step that ended them."""
        self._wake = asyncio.Event()
        self._closed = False

    def put_chunk(self, chunk: TokenChunk, *, stepped_at: float) -> None:
        """``stepped_at`` is ``time.monotonic`` of the end of the step."""
        key = (chunk.request_id, chunk.attempt, chunk.choice)
        pending = self._chunks.get(key)
        self._chunks[key] = chunk if pending is None else _merge(pending, chunk)
        self._since = stepped_at if self._since is None else self._since
        if chunk.finish_reason is not None:
            self._ended[key] = stepped_at
        self._wake.set()

    def put_token(self, key: int, choice: ChoiceKey, index: int, token_id: int, *, stepped_at: float) -> None:
        """``key`` is the gateway's name for the choice."""
        if choice in self._chunks:
            request_id, attempt, number = choice
            chunk = TokenChunk(
                request_id=request_id, choice=number, attempt=attempt, first_index=index, token_ids=(token_id,)
            )
            self.put_chunk(chunk, stepped_at=stepped_at)
            return
        self._keys.append(key)
        self._indexes.append(index)
        self._token_ids.append(token_id)
        if self._since is None:
            self._since = stepped_at
        self._wake.set()

    def put_failed(self, failed: AttemptFailed) -> None:
        self._failed.append(failed)
        self._wake.set()

    def put_accepted(self, accepted: AttemptAccepted) -> None:
        self._accepted.append(accepted)
        self._wake.set()

    def drop(self, request_id: RequestId, attempt: int) -> None:
        """Nobody wants the rest of this attempt. (Its plain tokens go to a name that nobody listens to.)"""
        for key in [key for key in self._chunks if key[:2] == (request_id, attempt)]:
            del self._chunks[key]
            self._ended.pop(key, None)

    def close(self) -> None:
        """End the stream after what is pending."""
        self._closed = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[StepOutputs]:
        """One empty message at once (the stream is registered), then one for each wake-up."""
        yield StepOutputs()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._keys or self._chunks or self._failed or self._accepted:
                yield self._take()
            elif self._closed:
                return
            if self._closed:
                self._wake.set()

    def _take(self) -> StepOutputs:
        now = time.monotonic()
        age_s = 0.0 if self._since is None else max(0.0, now - self._since)
        for key, ended_at in self._ended.items():
            chunk = self._chunks[key]
            if chunk.stages is not None:
                stages = replace(chunk.stages, delivery_s=max(0.0, now - ended_at))
                self._chunks[key] = replace(chunk, stages=stages)
        self._ended = {}
        outputs = StepOutputs(
            age_s=age_s,
            plain=PlainTokens(keys=tuple(self._keys), indexes=tuple(self._indexes), token_ids=tuple(self._token_ids))
            if self._keys
            else None,
            chunks=tuple(self._chunks.values()),
            failed=tuple(self._failed),
            accepted=tuple(self._accepted),
        )
        self._keys, self._indexes, self._token_ids = [], [], []
        self._chunks, self._failed, self._accepted, self._since = {}, [], [], None
        return outputs


def _merge(first: TokenChunk, second: TokenChunk) -> TokenChunk:
    assert second.first_index == first.first_index + len(first.token_ids), "tokens of a choice are consecutive"
    return replace(
        second,
        first_index=first.first_index,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        stages=second.stages or first.stages,
    )
