"""The ways in which models write calls and reasoning, and which of them a model uses."""

from collections.abc import Callable, Mapping
from enum import StrEnum

from gateway.tools.parsers import HermesParser, LlamaParser, MistralParser
from gateway.tools.reasoning import CLOSE, OPEN
from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter
from modelfiles import Tokenizer


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """Also Qwen's; what our own instruction asks for where a template knows no tools."""
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


PARSERS: Mapping[ToolFormat, Callable[[PieceWriter], TextReader]] = {
    ToolFormat.HERMES: HermesParser,
    ToolFormat.LLAMA3: LlamaParser,
    ToolFormat.MISTRAL: MistralParser,
}
MARKS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: HermesParser.marks,
    ToolFormat.LLAMA3: LlamaParser.marks,
    ToolFormat.MISTRAL: MistralParser.marks,
}


def format_of(template: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that a template teaches, by the marks in its source; None if it is none of ours."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else ToolFormat.HERMES
    if tokenizer.added_id("<|python_tag|>") is not None and '"parameters"' in template:
        return ToolFormat.LLAMA3
    return None


def has_reasoning(template: str, tokenizer: Tokenizer) -> bool:
    """Whether a model marks its reasoning: its template speaks of the marks, or its vocabulary has them."""
    return CLOSE in template or all(tokenizer.added_id(mark) is not None for mark in (OPEN, CLOSE))


def special_marks(marks: tuple[str, ...], tokenizer: Tokenizer) -> frozenset[int]:
    """The marks that are special tokens: their text must be seen although that of others is left out."""
    ids = (tokenizer.added_id(mark) for mark in marks)
    return frozenset(one for one in ids if one is not None and tokenizer.is_special(one))
