"""Structured output: sources compiled off the step thread, and where a sequence stands in its grammar.

The state of a grammar is a function of the generated tokens: :class:`GrammarState` accepts those it has not seen yet
before it is asked for a mask. So a decode worker that starts behind the first token, a retry and a preempted sequence
need nothing else.

Two lanes of one thread each: sources that are sure to be cheap (:func:`engine.grammar_compiler.is_cheap`) are
compiled at once; the others, one after the other, are first tried in a process that may be killed
(:mod:`engine.grammar_trial`). So a source that would take for ever is refused in time and leaves nothing running, and
nobody but its like waits for it.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core.errors import InternalError, InvalidRequest, QueueFull, ServingError
from core.grammar import GRAMMAR_PARAM, GrammarSource
from engine.grammar_compiler import Compiler, is_cheap
from engine.grammar_trial import Trial
from modelfiles.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

COMPILE_LIMIT_S = 4.0
"""Of processor time, for one source."""
WAIT_LIMIT_S = 9.0
"""Of those who wait for a compilation, their turn included: less than a call between processes may take."""
CACHE_BYTES = 64 << 20
CACHE_ENTRIES = 256
"""Of grammars, and of sources that were tried and refused."""
MAX_WAITING = 64


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
    """Compiles sources and remembers them, least recently used out first. Safe from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limit_s: float = COMPILE_LIMIT_S,
        wait_limit_s: float = WAIT_LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.wait_limit_s = wait_limit_s
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._compiling: dict[str, Future[CompiledGrammar]] = {}
        self._compiler = Compiler(self._vocabulary, eos_token_ids=eos_token_ids)
        self._trial = Trial(self._compiler, limit_s=limit_s, max_bytes=cache_bytes)
        self._cheap_lane = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._trial_lane = ThreadPoolExecutor(1, thread_name_prefix="grammar-trial")

    def find(self, source: str) -> CompiledGrammar | None:
        """The compiled grammar, if it is remembered."""
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                self._cache.move_to_end(source)
            return found

    def submit(self, source: str) -> Future[CompiledGrammar]:
        """Compile on a thread of ours; equal sources share one compilation. The future raises InvalidRequest for what
        is no grammar or takes more than the limits. Raises QueueFull, InvalidRequest."""
        is_tried = not is_cheap(GrammarSource.decode(source), self._vocab_size)
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                done: Future[CompiledGrammar] = Future()
                done.set_result(found)
                return done
            if source in self._refused:
                raise InvalidRequest(self._refused[source], param=GRAMMAR_PARAM, code="invalid_grammar")
            pending = self._compiling.get(source)
            if pending is None:
                if len(self._compiling) >= MAX_WAITING:
                    raise QueueFull("too many grammars are being compiled; try again")
                lane = self._trial_lane if is_tried else self._cheap_lane
                pending = self._compiling[source] = lane.submit(self._compile, source, is_tried)
            return pending

    def compile(self, source: str) -> CompiledGrammar:
        """Blocking. Raises InvalidRequest or QueueFull."""
        return self.find(source) or self.submit(source).result()

    def too_slow(self) -> ServingError:
        """What to raise when ``wait_limit_s`` passes. It is not the source's fault: that would have been told."""
        return QueueFull("other grammars are being compiled; try again")

    def close(self) -> None:
        """End what runs; whoever waits for it gets an error. Returns at once."""
        for lane in (self._cheap_lane, self._trial_lane):
            lane.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _compile(self, source: str, is_tried: bool) -> CompiledGrammar:
        try:
            if is_tried:
                self._try(source)
            compiled = CompiledGrammar(self._compiler.compile(GrammarSource.decode(source)))
            with self._lock:
                self._cache[source] = compiled
                self._trim()
            return compiled
        finally:
            with self._lock:
                self._compiling.pop(source, None)

    def _try(self, source: str) -> None:
        try:
            self._trial.check(source)
        except InvalidRequest as refusal:  # whoever asks again need not wait for it again
            with self._lock:
                self._refused[source] = refusal.message
                if len(self._refused) > CACHE_ENTRIES:
                    self._refused.popitem(last=False)
            raise

    def _trim(self) -> None:
        total = sum(one.num_bytes for one in self._cache.values())
        while len(self._cache) > 1 and (total > self._cache_bytes or len(self._cache) > CACHE_ENTRIES):
            _, oldest = self._cache.popitem(last=False)
            total -= oldest.num_bytes

    def _vocabulary(self) -> list[bytes]:
        tokenizer = self._tokenizer
        return [
            b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
            for token_id in range(self._vocab_size)
        ]
