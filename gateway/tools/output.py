"""Reads the text of one choice: what of it is content, what reasoning, what calls of tools."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.types import FinishReason
from gateway.text import TextDelta
from gateway.tools.dialect import PARSERS, ToolFormat
from gateway.tools.parsers import ListParser
from gateway.tools.pieces import Piece, Reasoning, Syntax
from gateway.tools.reasoning import ReasoningParser
from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """What of a request concerns how its text is read."""

    tools: Mapping[str, object] = field(default_factory=dict)
    """The tools that may be called, and the schemas of their arguments."""
    format: ToolFormat | None = None
    """How calls are written; None: there are none."""
    max_calls: int = 1
    """Calls behind these are left out."""
    is_forced: bool = False
    """The grammar admits nothing but a list of calls."""
    is_named: bool = False
    """The caller chose the function: calling it is what was asked, not a decision of the model."""
    has_reasoning: bool = False
    is_reasoning_open: bool = False
    """The prompt ends inside the block of reasoning."""
    shows_reasoning: bool = True


class OutputReader:
    """One choice as it grows. Pieces come in the order of the text; marks are never among them."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._writer = PieceWriter(rules.tools, max_calls=rules.max_calls)
        self._reasoning: ReasoningParser | None = None
        self._parser = self._calls_parser()
        if rules.has_reasoning:
            self._reasoning = ReasoningParser(self._writer, self._parser, is_open=rules.is_reasoning_open)
            self._parser = self._reasoning
        self._offsets: list[int] = []
        self._num_reasoning_tokens = 0
        self._is_counted = False

    def take(self, delta: TextDelta) -> list[Piece]:
        """What the delta adds; with its finish reason everything that was held back."""
        self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            self._parser.finish()
        if self._reasoning is not None:
            self._count(delta, self._reasoning)
        return [piece for piece in self._writer.take() if self._is_shown(piece)]

    def finish_reason(self, given: FinishReason) -> str:
        """What a caller is told: that it has to answer calls, if there are any and all of them are whole."""
        writer = self._writer
        has_calls = writer.num_calls > 0 and writer.num_incomplete == 0
        return TOOL_CALLS if given is FinishReason.STOP and has_calls and not self._rules.is_named else given

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the block, its marks included."""
        return self._num_reasoning_tokens

    def _calls_parser(self) -> TextReader:
        if self._rules.is_forced:
            return ListParser(self._writer)
        return TextReader(self._writer) if self._rules.format is None else PARSERS[self._rules.format](self._writer)

    def _is_shown(self, piece: Piece) -> bool:
        return not isinstance(piece, Syntax) and (self._rules.shows_reasoning or not isinstance(piece, Reasoning))

    def _count(self, delta: TextDelta, reasoning: ReasoningParser) -> None:
        """A token is of the block if its text begins before the block's end: known when the end is."""
        if self._is_counted:
            return
        self._offsets += delta.offsets
        if reasoning.end is not None:
            self._is_counted = True
            self._num_reasoning_tokens = bisect_left(self._offsets, reasoning.end)
        elif reasoning.has_block:
            self._num_reasoning_tokens = len(self._offsets)
