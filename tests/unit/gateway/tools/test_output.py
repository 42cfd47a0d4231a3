"""One choice read: what its tokens are counted as and how it is said to have ended."""

from __future__ import annotations

import pytest

from core.types import FinishReason
from gateway.text import ChoiceText, TextRules
from gateway.tools.dialect import ToolFormat
from gateway.tools.output import OutputReader, OutputRules
from gateway.tools.pieces import Piece, Reasoning
from tests.support.tiny_tokenizer import ids_of, tiny_tokenizer

CALL = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
TOOLS = {"w": {"type": "object"}}


def read(
    text: str,
    rules: OutputRules,
    *,
    size: int = 1,
    finish: FinishReason = FinishReason.STOP,
    stop: tuple[str, ...] = (),
) -> tuple[OutputReader, list[Piece], str]:
    ids = ids_of(text)
    choice, reader = ChoiceText(tiny_tokenizer(), TextRules(stop=stop)), OutputReader(rules)
    pieces: list[Piece] = []
    for at in range(0, len(ids), size):
        is_last = at + size >= len(ids)
        delta = choice.append(ids[at : at + size], finish_reason=finish if is_last else None)
        pieces += reader.take(delta)
        if delta.finish_reason is not None:
            return reader, pieces, reader.finish_reason(delta.finish_reason)
    raise AssertionError("the text has no end")


@pytest.mark.parametrize(
    ("text", "finish", "more", "expected"),
    [
        (CALL, FinishReason.STOP, {}, "tool_calls"),
        (f"Look: {CALL}{CALL}", FinishReason.STOP, {}, "tool_calls"),
        ("no call", FinishReason.STOP, {}, "stop"),
        (CALL, FinishReason.STOP, {"is_named": True}, "stop"),
        (CALL, FinishReason.LENGTH, {}, "length"),
        (CALL[:-15], FinishReason.LENGTH, {}, "length"),
        (CALL[:-15], FinishReason.STOP, {}, "stop"),
        (CALL + CALL[:-15], FinishReason.STOP, {}, "stop"),
    ],
)
def test_bug_046_only_whole_calls_end_an_answer_as_tool_calls(
    text: str, finish: FinishReason, more: dict[str, bool], expected: str
) -> None:
    rules = OutputRules(tools=TOOLS, format=ToolFormat.HERMES, max_calls=9, **more)
    assert read(text, rules, finish=finish)[2] == expected


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", [(), ("thi zz",)])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>Hm</think>\n\nYes", False, len("<think>Hm</think>")),
        ("Hm</think>Yes", True, len("Hm</think>")),
        ("<think>Hm, thi", False, len("<think>Hm, thi")),
        ("Yes", False, 0),
        ("Hm", True, 2),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_marks(
    text: str, is_open: bool, expected: int, stop: tuple[str, ...], size: int
) -> None:
    rules = OutputRules(has_reasoning=True, is_reasoning_open=is_open)
    assert read(text, rules, size=size, stop=stop)[0].num_reasoning_tokens == expected


def test_reasoning_may_be_left_out_but_counts() -> None:
    rules = OutputRules(has_reasoning=True, shows_reasoning=False)
    reader, pieces, _ = read("<think>Hm</think>Yes", rules)
    assert not any(isinstance(piece, Reasoning) for piece in pieces)
    assert reader.num_reasoning_tokens > 0
