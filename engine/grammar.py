"""Structured output: sources compiled off the step thread, and where a sequence stands in its grammar.

The state of a grammar is a function of the generated tokens: :class:`GrammarState` accepts those it has not seen yet
before it is asked for a mask. So a decode worker that starts behind the first token, a retry and a preempted sequence
need nothing else.

What JSON grammars are tightened to, beyond the library's own, so that no answer runs to its limit for nothing and every
answer parses: digits are bounded (integers to 19, fractions to 17, exponents to 2), control characters are always
escaped, a character has one spelling (so a key cannot be repeated under another one), white space is as ``json.dumps``
writes it or bounded.

xgrammar takes a second to import: it is imported by the first request that needs it, on the compiling thread.
"""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core.errors import InternalError, InvalidRequest, QueueFull, ServingError
from core.grammar import GRAMMAR_PARAM, MAX_WHITESPACE, GrammarKind, GrammarSource
from modelfiles.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

NUM_THREADS = 2
COMPILE_LIMIT_S = 5.0
CACHE_BYTES = 64 << 20
CACHE_ENTRIES = 256
MAX_WAITING = 64
MAX_MESSAGE_CHARS = 300


class GrammarState:
    """The place of one sequence in its grammar. Used on the step thread."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher") -> None:
        self._matcher = matcher
        self._num_accepted = 0

    def follow(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Accept the tokens behind the prompt that are new since the last call. Raises InternalError when the grammar
        forbids one."""
        for index in range(num_prompt + self._num_accepted, len(tokens)):
            if not self._matcher.accept_token(tokens[index]):
                raise InternalError(f"token {index - num_prompt} of the answer ({tokens[index]}) leaves the grammar")
            self._num_accepted += 1

    def fill(self, bits_RW: npt.NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens that may come next, and clear those of the others."""
        self._matcher.fill_next_token_bitmask(bits_RW, row)

    @property
    def is_complete(self) -> bool:
        """What was generated is a whole sentence of the grammar (it may have longer ones)."""
        return self._matcher.is_completed()


class CompiledGrammar:
    """What all sequences of one source share."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar") -> None:
        self._compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes

    def start(self) -> GrammarState:
        import xgrammar

        return GrammarState(xgrammar.GrammarMatcher(self._compiled))


class Grammars:
    """Compiles sources and remembers them, least recently used out first. Safe from any thread.

    A source that takes longer than ``limit_s`` is refused; the thread it holds is free again when it is done, so the
    bounds of the gateway on size, depth and repetition are what bounds the work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limit_s: float = COMPILE_LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._limit_s = limit_s
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._compiling: dict[str, Future[CompiledGrammar]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}

    def find(self, source: str) -> CompiledGrammar | None:
        """The compiled grammar, if it is remembered."""
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                self._cache.move_to_end(source)
            return found

    def submit(self, source: str) -> Future[CompiledGrammar]:
        """Compile on a thread of ours; equal sources share one compilation. The future raises InvalidRequest for what
        is no grammar. Raises QueueFull."""
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                done: Future[CompiledGrammar] = Future()
                done.set_result(found)
                return done
            pending = self._compiling.get(source)
            if pending is None:
                if len(self._compiling) >= MAX_WAITING:
                    raise QueueFull("too many grammars are being compiled; try again")
                pending = self._compiling[source] = self._threads.submit(self._compile, source)
            return pending

    def compile(self, source: str) -> CompiledGrammar:
        """Blocking, within the limit of time. Raises InvalidRequest or QueueFull."""
        found = self.find(source)
        if found is not None:
            return found
        try:
            return self.submit(source).result(self._limit_s)
        except FutureTimeout:
            raise self.too_slow(source) from None

    @property
    def limit_s(self) -> float:
        return self._limit_s

    def too_slow(self, source: str) -> ServingError:
        """What to raise when the limit passes: the source's fault, unless it never had its turn."""
        with self._lock:
            pending = self._compiling.get(source)
        if pending is not None and not pending.running():
            return QueueFull("other grammars are being compiled; try again")
        return InvalidRequest(
            f"the grammar takes more than {self._limit_s:g} s to compile: make it smaller",
            param=GRAMMAR_PARAM,
            code="invalid_grammar",
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, source: str) -> CompiledGrammar:
        try:
            compiled = CompiledGrammar(self._build(GrammarSource.decode(source)))
            with self._lock:
                self._cache[source] = compiled
                self._trim()
            return compiled
        finally:
            with self._lock:
                self._compiling.pop(source, None)

    def _trim(self) -> None:
        total = sum(one.num_bytes for one in self._cache.values())
        while len(self._cache) > 1 and (total > self._cache_bytes or len(self._cache) > CACHE_ENTRIES):
            _, oldest = self._cache.popitem(last=False)
            total -= oldest.num_bytes

    def _build(self, source: GrammarSource) -> "xgrammar.CompiledGrammar":
        if not self._eos_token_ids:
            raise InvalidRequest("the model has no end token: structured output needs one")
        try:
            grammar = _grammar_of(source)
            is_json = source.kind is GrammarKind.JSON_SCHEMA
            # A pattern would admit raw control characters, which JSON does not: no token may bring them.
            is_one_line = is_json and (not source.free_whitespace or "Regex(" in str(grammar))
            return self._compiler(is_one_line).compile_grammar(grammar)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            message = f"the {source.kind} cannot be compiled: {_reason(error)}"
            raise InvalidRequest(message, param=GRAMMAR_PARAM, code="invalid_grammar") from None

    def _compiler(self, is_one_line: bool) -> "xgrammar.GrammarCompiler":
        import xgrammar

        with self._backend_lock:
            found = self._compilers.get(is_one_line)
            if found is None:
                info = xgrammar.TokenizerInfo(
                    self._vocabulary(is_one_line),
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=self._eos_token_ids,
                )
                found = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._compilers[is_one_line] = found
            return found

    def _vocabulary(self, is_one_line: bool) -> list[bytes]:
        """Bytes of every id. Special tokens and padding have none, so no grammar can ask for them; ``is_one_line``:
        nor have tokens with control characters."""
        tokenizer = self._tokenizer
        vocabulary = [
            b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
            for token_id in range(self._vocab_size)
        ]
        return [b"" if is_one_line and min(one, default=32) < 32 else one for one in vocabulary]


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
