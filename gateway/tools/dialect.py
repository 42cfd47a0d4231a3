"""How one model is told of tools, how it writes calls, and whether it marks its reasoning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from core.errors import ConfigError
from gateway.tools.parsers import HermesParser, LlamaParser, MistralParser
from gateway.tools.reasoning import CLOSE, OPEN, ReasoningParser
from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter
from gateway.tools.xml_parser import XmlParser
from modelfiles import ChatTemplate, TemplateTraits, Tokenizer, traits_of


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """Also Qwen's; what our own instruction asks for where a template knows no tools."""
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"


PARSERS: Mapping[ToolFormat, Callable[[PieceWriter], TextReader]] = {
    ToolFormat.HERMES: HermesParser,
    ToolFormat.LLAMA3: LlamaParser,
    ToolFormat.MISTRAL: MistralParser,
    ToolFormat.QWEN3_CODER: XmlParser,
}
_MARKS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: HermesParser.marks,
    ToolFormat.LLAMA3: LlamaParser.marks,
    ToolFormat.MISTRAL: MistralParser.marks,
    ToolFormat.QWEN3_CODER: XmlParser.marks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The neutral one knows nothing of tools or reasoning: our own instruction tells the model."""

    format: ToolFormat = ToolFormat.HERMES
    is_taught: bool = False
    """The template shows tools, calls and results in that format."""
    traits: TemplateTraits = field(default_factory=partial(TemplateTraits, has_system=True))
    has_reasoning: bool = False
    special_call_marks: frozenset[int] = frozenset()
    special_reasoning_marks: frozenset[int] = frozenset()
    """Marks that are special tokens: their text must be seen although that of others is left out, and no grammar can
    ask for them."""

    @property
    def special_marks(self) -> frozenset[int]:
        return self.special_call_marks | self.special_reasoning_marks


def dialect_of(
    template: ChatTemplate | None, tokenizer: Tokenizer, *, tool_format: str = "auto", reasoning: str = "auto"
) -> Dialect:
    """The operator's word (`auto`: what the template says). A template that teaches a format that is none of ours is
    not asked about tools: nobody could read the answers. Raises ConfigError for a format that no template teaches."""
    traits = TemplateTraits() if template is None else traits_of(template)
    source = "" if template is None else template.source
    knows_tools = traits.has_tools and traits.has_calls
    if tool_format not in ("auto", ToolFormat.HERMES) and not knows_tools:
        raise ConfigError(
            f"tool_format is {tool_format}, but the model's chat template does not show tools and calls: give it "
            "a template that does, or say tool_format: auto (then an instruction of ours is used)"
        )
    found = _format_of(source, tokenizer) if tool_format == "auto" else ToolFormat(tool_format)
    has_reasoning = _has_reasoning(source, tokenizer) if reasoning == "auto" else reasoning == "think"
    written = found if found is not None and knows_tools else ToolFormat.HERMES
    return Dialect(
        format=written,
        is_taught=found is not None and knows_tools,
        traits=traits,
        has_reasoning=has_reasoning,
        special_call_marks=_special(_MARKS[written], tokenizer),
        special_reasoning_marks=_special(ReasoningParser.marks if has_reasoning else (), tokenizer),
    )


def _special(marks: tuple[str, ...], tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.added_id(mark) for mark in marks)
    return frozenset(one for one in ids if one is not None and tokenizer.is_special(one))


def _format_of(source: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """By the marks in a template's source; None for other formats."""
    if "[TOOL_CALLS]" in source:
        return ToolFormat.MISTRAL
    if "<tool_call>" in source:
        return ToolFormat.QWEN3_CODER if "<function=" in source else ToolFormat.HERMES
    if tokenizer.added_id("<|python_tag|>") is not None and '"parameters"' in source:
        return ToolFormat.LLAMA3
    return None


def _has_reasoning(source: str, tokenizer: Tokenizer) -> bool:
    """The template speaks of the marks, or the vocabulary has them."""
    return CLOSE in source or all(tokenizer.added_id(mark) is not None for mark in (OPEN, CLOSE))
