"""From a source to what the matcher needs: pure work over one vocabulary, for a thread of the worker and for the
process that tries sources out (:mod:`engine.grammar_trial`).

What JSON grammars are tightened to, beyond the library's own, so that no answer runs to its limit for nothing and every
answer parses: digits are bounded (integers to 19, fractions to 17, exponents to 2), control characters are always
escaped, a character has one spelling (so a key cannot be repeated under another one), white space is as ``json.dumps``
writes it or bounded.

xgrammar takes a second to import: it is imported by the first request that needs it, on the compiling thread.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from core.errors import InvalidRequest
from core.grammar import GRAMMAR_PARAM, MAX_WHITESPACE, GrammarKind, GrammarSource

if TYPE_CHECKING:
    import xgrammar

MAX_MESSAGE_CHARS = 300
CHEAP_PLACES = 5_000_000
"""Places of an expression times tokens of the vocabulary. One takes 0.2 us, the most that was measured."""
CHEAP_SCHEMA_CHARS = 8192
"""A schema without patterns compiles in the time of its length: 0.1 s for 200 properties, 4 s for 1000."""
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")


def is_cheap(source: GrammarSource, vocab_size: int) -> bool:
    """Whether compiling is sure to take about a second at most.

    The library computes the tokens that may follow each place of the source's automaton, and an expression has no more
    places than its text with all repetitions written out.
    """
    if source.kind is GrammarKind.CHOICE or (
        source.kind is GrammarKind.JSON_SCHEMA and '"pattern' not in source.source
    ):
        return len(source.source) <= CHEAP_SCHEMA_CHARS
    num_places = len(source.source) * vocab_size
    for found in _REPEATS.finditer(source.source):
        num_places *= max(1, *(int(number.lstrip("0")[:9] or 0) for number in found.groups()))
        if num_places > CHEAP_PLACES:
            return False
    return num_places <= CHEAP_PLACES


class Compiler:
    """``vocabulary`` gives the bytes of every id; special tokens and padding have none, so no grammar asks for them.
    Safe from any thread."""

    def __init__(self, vocabulary: Callable[[], list[bytes]], *, eos_token_ids: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self.eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._backends: dict[bool, xgrammar.GrammarCompiler] = {}

    def compile(self, source: GrammarSource) -> "xgrammar.CompiledGrammar":
        """Raises InvalidRequest for what is no grammar, and MemoryError."""
        if not self.eos_token_ids:
            raise InvalidRequest("the model has no end token: structured output needs one")
        try:
            grammar = _grammar_of(source)
            is_json = source.kind is GrammarKind.JSON_SCHEMA
            # A pattern would admit raw control characters, which JSON does not: no token may bring them.
            is_one_line = is_json and (not source.free_whitespace or "Regex(" in str(grammar))
            return self._backend(is_one_line).compile_grammar(grammar)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            message = f"the {source.kind} cannot be compiled: {_reason(error)}"
            raise InvalidRequest(message, param=GRAMMAR_PARAM, code="invalid_grammar") from None

    def warm(self) -> None:
        """Do now what the first sources would wait for."""
        for is_one_line in (False, True):
            self._backend(is_one_line)

    def _backend(self, is_one_line: bool) -> "xgrammar.GrammarCompiler":
        """``is_one_line``: tokens with control characters do not exist."""
        import xgrammar

        with self._lock:
            found = self._backends.get(is_one_line)
            if found is None:
                vocabulary = self.vocabulary()
                info = xgrammar.TokenizerInfo(
                    [b"" if is_one_line and min(one, default=32) < 32 else one for one in vocabulary],
                    xgrammar.VocabType.RAW,
                    vocab_size=len(vocabulary),
                    stop_token_ids=self.eos_token_ids,
                )
                found = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._backends[is_one_line] = found
            return found


def _reason(error: Exception) -> str:
    """The library's words without its time and source line."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = text.removeprefix("Check failed: (error.empty()) is false: ")
    return text.replace("\n", " ")[:MAX_MESSAGE_CHARS]


# -- from a source to a grammar ---------------------------------------------------------------------------------------


def _grammar_of(source: GrammarSource) -> "xgrammar.Grammar":
    import xgrammar

    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            grammar = xgrammar.Grammar.from_json_schema(
                source.source,
                any_whitespace=source.free_whitespace,
                max_whitespace_cnt=MAX_WHITESPACE if source.free_whitespace else None,
                strict_mode=False,
            )
            return xgrammar.Grammar.from_ebnf(tightened(str(grammar)))
        case GrammarKind.STRUCTURAL_TAG:
            return xgrammar.Grammar.from_ebnf(tightened(str(xgrammar.Grammar.from_structural_tag(source.source))))
        case GrammarKind.CHOICE:
            texts = json.loads(source.source)
            if not isinstance(texts, list) or not texts:
                raise ValueError("a list of texts is needed")
            elements = [{"type": "const_string", "value": text} for text in texts]
            tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
            return xgrammar.Grammar.from_structural_tag(tag)
        case GrammarKind.REGEX:
            return xgrammar.Grammar.from_regex(source.source)
        case GrammarKind.EBNF:
            return xgrammar.Grammar.from_ebnf(source.source)


# A number has the same rules under its own name wherever a reference names it.
_DIGIT_RULES = (
    (re.compile(r'^(\w+ ::= \(\("0"\) \| \((?:\w+ )?\[1-9\] )\[0-9\]\*\)\)$', re.MULTILINE), r"\1[0-9]{0,18}))"),
    (re.compile(r'^(\w+ ::= \("" \| \("\." \w+)\{1, -1\}\)\)$', re.MULTILINE), r"\1{1, 17}))"),
    (re.compile(r'^(\w+ ::= \("" \| \(\[eE\] \w+ \w+)\{1, -1\}\)\)$', re.MULTILINE), r"\1{1, 2}))"),
)
# \u only for what cannot be written plainly.
_ESCAPE_RULE = r'basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))'
_ESCAPE_RULE_TIGHT = r'basic_escape ::= (([\"\\bfnrt]) | ("u" "0" "0" [01] [a-f0-9]))'
_PLAIN_CHARACTERS = re.compile(r'^(\w+ ::= \(\(\[\^\\"\\\\)\\r\\n(\]\)\))$', re.MULTILINE)
_ESCAPES = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
_EBNF_PIECES = re.compile(r'\(=\(|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]\*?')


def tightened(ebnf: str) -> str:
    """The JSON rules of a printed grammar, bounded as the module says. Other rules are left alone.

    The printer writes \\xNN with two digits, the parser reads as many as there are: \\u00NN means the same to both.
    """
    ebnf = _ESCAPES.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], ebnf)
    text = ebnf.replace(_ESCAPE_RULE, _ESCAPE_RULE_TIGHT)
    for rule, bounded in _DIGIT_RULES:
        text = rule.sub(bounded, text)
    text = _PLAIN_CHARACTERS.sub(r"\1\\0-\\x1f\2", text)
    is_lookahead = False
    pieces: list[str] = []
    end = 0
    for found in _EBNF_PIECES.finditer(text):
        piece = found[0]
        if piece == r"[ \n\r\t]*" and not is_lookahead:
            piece = rf"[ \n\r\t]{{0,{MAX_WHITESPACE}}}"
        is_lookahead = found[0] == "(=("
        pieces += (text[end : found.start()], piece)
        end = found.end()
    return "".join(pieces) + text[end:]
