"""From token ids to text that may be sent: the text layer of one choice.

Three laws hold for any grouping of tokens into steps: sent text is append-only, a character is sent whole or not at
all, and nothing is sent that may still become a stop string. Work per token depends on the token, not on the text.

Fixed rules where peers differ:

- A stop string ends the run at the first character that completes any stop (ties: the longest stop). A match completed
  by a token before `min_tokens` does not count.
- A run that ends inside a character ends with one U+FFFD, as `Tokenizer.decode` of the same ids does; log probabilities
  carry the true bytes.
- The token that ended a run as a stop token adds no text, unless the caller asked to see stops.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import FinishReason, TokenLogprobs
from modelfiles import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What of a request concerns its text."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_special: frozenset[int] = frozenset()
    """Special tokens that are not left out: a parser waits for their text."""


@dataclass(slots=True, kw_only=True)
class TextDelta:
    """What accepted tokens add to a choice. `token_ids` are all of them, also those whose text is held or hidden.

    Nobody changes one; it is not frozen because there is one for each token, and frozen ones take three times as long.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    """For each token, the number of characters of the answer before it."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The matched stop string or the stop token of the caller."""
    num_overrun: int = 0
    """Tokens that came after a stop string had matched: made, but no part of the answer."""


class Detokenizer:
    """Incremental decoding of one sequence: bytes in, whole characters out."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown_special: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_special = shown_special
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.ordinary_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """No character is begun: a token of whole characters is its own text."""
        self._strips_space = tokenizer.strips_leading_space

    @property
    def is_between(self) -> bool:
        """No character is begun, and no space is to be left out."""
        return self._is_between and not self._strips_space

    def append(self, token_id: int) -> str:
        """The characters that are complete now and were not before."""
        if self._is_between and not self._strips_space:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._shown_special:
            return ""
        text = self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """U+FFFD for a character that never became complete, else nothing."""
        return self._strip(self._decoder.decode(b"", True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds the first completed stop string and knows how much text might still become one (Knuth-Morris-Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first, so that of several stops completed by one character the longest is reported.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._lengths = [0] * len(stops)

    def feed(self, character: str) -> str | None:
        """Takes one character; the stop string it completes, if any."""
        completed = None
        for index, stop in enumerate(self._stops):
            fallback, length = self._fallbacks[index], self._lengths[index]
            if length == len(stop):
                length = fallback[length]
            while length and stop[length] != character:
                length = fallback[length]
            if stop[length] == character:
                length += 1
            self._lengths[index] = length
            if length == len(stop) and completed is None:
                completed = stop
        return completed

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        held = 0
        for stop, fallback, length in zip(self._stops, self._fallbacks, self._lengths, strict=True):
            held = max(held, fallback[length] if length == len(stop) else length)
        return held


def _fallback_table(stop: str) -> list[int]:
    """table[n]: length of the longest proper prefix of `stop` that also ends `stop[:n]`."""
    table = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length]
        if stop[length] == character:
            length += 1
        table.append(length)
    return table


class ChoiceText:
    """The text of one choice as it grows. After a delta with a `finish_reason` nothing may be appended."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._rules = rules
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=rules.skip_special_tokens, shown_special=rules.shown_special
        )
        self._matcher = StopMatcher(rules.stop)
        self._pending = ""
        self._num_chars = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def is_plain(self) -> bool:
        """The next token's text is its own, if it is one of whole characters."""
        return self.finish_reason is None and self._detokenizer.is_between and not self._rules.stop

    def append_token(self, token_id: int) -> TextDelta:
        """Accepts one token that is nothing but a token."""
        if self._rules.stop:
            return self.append((token_id,))
        self.num_tokens += 1
        offset = self._num_chars
        text = self._detokenizer.append(token_id)
        self._num_chars = offset + len(text)
        return TextDelta(text=text, token_ids=(token_id,), offsets=(offset,))

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        is_callers_stop: bool = False,
    ) -> TextDelta:
        """Accepts tokens in order. `finish_reason` is the engine's verdict and comes with (or after) the last token.

        `stop_token_id` is the token that ended the run; `is_callers_stop` tells the caller's stop ids from the
        model's EOS (only the former is a `stop_reason`).
        """
        assert self.finish_reason is None, "tokens after the end of a choice"
        text: list[str] = []
        offsets: list[int] = []
        stop: str | None = None
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            offsets.append(self._num_chars)
            if index == last and stop_token_id == token_id and not self._rules.include_stop:
                break
            stop = self._take(self._detokenizer.append(token_id), text)
            if stop is not None:
                break
        num_accepted = len(offsets)
        num_overrun = len(token_ids) - num_accepted
        if stop is None and finish_reason is not None:
            stop = self._take(self._detokenizer.finish(), text)
        stop_reason: str | int | None = stop
        if stop is not None:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text.append(self._pending)
            stop_reason = stop_token_id if is_callers_stop else None
        self.finish_reason = finish_reason
        return TextDelta(
            text="".join(text),
            token_ids=tuple(token_ids[:num_accepted]),
            logprobs=tuple(logprobs[:num_accepted]),
            offsets=tuple(offsets),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_overrun=num_overrun,
        )

    def _take(self, characters: str, text: list[str]) -> str | None:
        """Adds new characters; what may be sent goes to `text`. The stop string that ended the run, if one did."""
        self._num_chars += len(characters)
        if not self._rules.stop:
            text.append(characters)
            return None
        for position, character in enumerate(characters):
            stop = self._matcher.feed(character)
            if stop is not None and self.num_tokens >= self._rules.min_tokens:
                self._pending += characters[: position + 1]
                end = len(self._pending) - (0 if self._rules.include_stop else len(stop))
                text.append(self._pending[:end])
                self._pending = ""
                return stop
        self._pending += characters
        end = len(self._pending) - self._matcher.num_held
        text.append(self._pending[:end])
        self._pending = self._pending[end:]
        return None
