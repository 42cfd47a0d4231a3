"""What a gateway is told, in which order, while it reads and while it does not."""

from __future__ import annotations

import asyncio

from core.ids import GatewayId, Incarnation, RequestId
from core.types import FinishReason, PlainTokens, StepOutputs, TokenChunk
from decode_worker.outbox import Outbox
from rpc.convert import from_pb, to_pb

NAME = (RequestId("r"), 1, 0)


def chunk(index: int, *tokens: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(
        request_id=NAME[0], choice=0, attempt=1, first_index=index, token_ids=tokens, finish_reason=finish
    )


async def taken(outbox: Outbox) -> StepOutputs:
    messages = outbox.messages()
    await anext(messages)  # "the stream is registered"
    return await asyncio.wait_for(anext(messages), 5)


async def test_plain_tokens_are_columns_and_a_chunk_behind_them_is_read_behind_them() -> None:
    outbox = Outbox(GatewayId("g"), Incarnation(1))
    outbox.put_token(7, NAME, 3, 50, stepped_at=0)
    outbox.put_token(9, (RequestId("s"), 1, 0), 0, 60, stepped_at=0)
    outbox.put_token(7, NAME, 4, 51, stepped_at=0)
    outbox.put_chunk(chunk(5, 52, finish=FinishReason.LENGTH), stepped_at=0)
    message = await taken(outbox)
    assert message.plain == PlainTokens(keys=(7, 9, 7), indexes=(3, 0, 4), token_ids=(50, 60, 51))
    assert [one.first_index for one in message.chunks] == [5]
    assert from_pb(StepOutputs, to_pb(message)) == message


async def test_a_plain_token_does_not_overtake_a_chunk_of_its_choice() -> None:
    outbox = Outbox(GatewayId("g"), Incarnation(1))
    outbox.put_chunk(chunk(0, 50), stepped_at=0)
    outbox.put_token(7, NAME, 1, 51, stepped_at=0)
    outbox.put_chunk(chunk(2, 52, finish=FinishReason.STOP), stepped_at=0)
    message = await taken(outbox)
    assert message.plain is None
    assert message.chunks == (chunk(0, 50, 51, 52, finish=FinishReason.STOP),)
