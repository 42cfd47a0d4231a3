"""Long prompt scores travel in several messages; nothing is lost, doubled or out of order."""

from __future__ import annotations

import pytest

from core.ids import RequestId
from core.types import FinishReason, StageTimes, StepOutputs, TokenChunk, TokenLogprobs
from rpc import parts
from rpc.convert import to_pb
from rpc.parts import split_outputs, split_scores


def scores(count: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    top = tuple((49_000 + index, -float(index)) for index in range(num_top))
    return tuple(TokenLogprobs(logprob=-float(index), rank=index + 1, top=top) for index in range(count))


def chunk(name: str, prompt_logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
    return TokenChunk(
        request_id=RequestId(name),
        choice=0,
        attempt=1,
        first_index=0,
        token_ids=(7,),
        logprobs=scores(1, 0),
        prompt_logprobs=prompt_logprobs,
        finish_reason=FinishReason.LENGTH,
        stages=StageTimes(),
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 11])
def test_parts_join_to_the_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SCORES", 6)
    whole = scores(count, 2)
    split = split_scores(whole)
    assert sum(split, ()) == whole
    assert len(split) == max(1, -(-count // 2))


def test_a_part_of_the_longest_lists_stays_far_below_the_limit_of_a_message() -> None:
    largest = max(split_scores(scores(8192, 20)), key=len)
    outputs = StepOutputs(chunks=(chunk("a", largest),))
    assert to_pb(outputs).ByteSize() < 2 << 20


def test_only_the_last_message_of_a_step_has_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SCORES", 4)
    outputs = StepOutputs(age_s=0.5, chunks=(chunk("plain"), chunk("scored", scores(9, 0))))
    *before, last = split_outputs(outputs)
    assert [one.request_id for message in before for one in message.chunks] == ["scored", "scored"]
    assert all(not one.token_ids and one.finish_reason is None for message in before for one in message.chunks)
    assert [one.request_id for one in last.chunks] == ["plain", "scored"]
    assert all(one.token_ids == (7,) and one.finish_reason for one in last.chunks)
    told = [one.prompt_logprobs for message in (*before, last) for one in message.chunks if one.request_id == "scored"]
    assert sum(told, ()) == scores(9, 0)


def test_a_step_without_scores_is_sent_as_it_is() -> None:
    outputs = StepOutputs(chunks=(chunk("a"),))
    (only,) = split_outputs(outputs)
    assert only is outputs
