"""What an answer must look like, as one canonical text: `SamplingParams.grammar`.

The gateway writes it (checked, in one spelling), a worker compiles it. Equal texts are equal grammars, so a text is a
cache key. It is JSON: ``{"kind": "regex", "source": "[0-9]+"}``.
"""

import json
from dataclasses import dataclass
from enum import StrEnum

from core.errors import InvalidRequest

MAX_SOURCE_BYTES = 1 << 16
GRAMMAR_PARAM = "structured_outputs"
"""The param of an error about a grammar; a gateway puts the caller's own name of it there."""
MAX_WHITESPACE = 20
"""Most white space characters in one place where white space is free."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    """``source`` is a schema as JSON text; properties are written in its order."""
    REGEX = "regex"
    CHOICE = "choice"
    """``source`` is a JSON list of texts."""
    EBNF = "ebnf"
    """``source`` starts at the rule ``root``, in the GBNF notation."""
    STRUCTURAL_TAG = "structural_tag"
    """``source`` is a structural tag as JSON text: text that is free but for tagged parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    kind: GrammarKind
    source: str
    free_whitespace: bool = False
    """JSON by schema only: white space wherever JSON has it, up to MAX_WHITESPACE; else one line as ``json.dumps``."""

    def encode(self) -> str:
        content: dict[str, str | bool] = {"kind": self.kind, "source": self.source}
        if self.free_whitespace:
            content["free_whitespace"] = True
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "GrammarSource":
        """Raises InvalidRequest for anything that :meth:`encode` did not write."""
        if len(text) > 2 * MAX_SOURCE_BYTES:
            raise InvalidRequest("the grammar is too large", param=GRAMMAR_PARAM)
        try:
            content = json.loads(text)
            return cls(
                kind=GrammarKind(content["kind"]),
                source=str(content["source"]),
                free_whitespace=content.get("free_whitespace") is True,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InvalidRequest("the grammar is not a canonical source", param=GRAMMAR_PARAM) from None
