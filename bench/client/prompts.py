"""Words of parts. The same key has the same words, and a shorter part with that key has the first of them."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from bench.client.scripts import Part

_COMMON = """
time people way water words man work part place year house world school point city earth father head land home hand
picture air line name boy story night life food sun state eye door face wood list music paper group book river
mountain road field fire king town friend body dog family horse order red blue green white black high low small large
long short old new young good great little right left first last next early late hard open plain close near far deep
wide clear full free sure true whole best common simple strong dark cold warm dry main front read write run walk turn
move play stand find give make take come look help show learn grow start stop keep leave
"""
"""Each is one token behind a space, in nearly every vocabulary of byte pairs."""


class Words:
    """Text of one token a word, each behind a space: so neighbours do not change what a word becomes. Common English
    words where none are given."""

    def __init__(self, words: Sequence[str] = (), *, seed: int = 0) -> None:
        self._words = [" " + word for word in words or _COMMON.split()]
        self._seed = seed
        self._text = lru_cache(maxsize=4096)(self._make)

    @property
    def vocabulary(self) -> list[str]:
        """Without the spaces before them."""
        return [word[1:] for word in self._words]

    def text(self, parts: Iterable[Part]) -> str:
        return "".join(self._text(part.key, part.num_tokens) for part in parts)

    def _make(self, key: str, num_tokens: int) -> str:
        words = self._words
        return "".join([words[number] for number in _numbers(f"{self._seed} {key}", num_tokens, len(words))])


class Ids:
    """Token ids, for endpoints that take them: lengths are exact without knowing the vocabulary's words."""

    def __init__(self, vocabulary: Sequence[int] = range(300, 2000), *, seed: int = 0) -> None:
        self._vocabulary = list(vocabulary)
        self._seed = seed
        self._ids = lru_cache(maxsize=4096)(self._make)

    def ids(self, parts: Iterable[Part]) -> list[int]:
        return [each for part in parts for each in self._ids(part.key, part.num_tokens)]

    def _make(self, key: str, num_tokens: int) -> tuple[int, ...]:
        ids = self._vocabulary
        return tuple([ids[number] for number in _numbers(f"{self._seed} {key}", num_tokens, len(ids))])


def _numbers(key: str, count: int, below: int) -> list[int]:
    """Of the key alone, evenly enough: the first of them do not depend on how many there are."""
    digest = hashlib.shake_128(key.encode()).digest(4 * count)
    numbers: list[int] = (np.frombuffer(digest, "<u4") % below).tolist()
    return numbers


def single_token_words(texts: Iterable[str]) -> list[str]:
    """Of a vocabulary's texts, the plain words that are one token behind a space. Empty when it has too few of them to
    make different prompts of."""
    words = {text[1:] for text in texts if text[:1] == " " and len(text) > 2 and text[1:].isalpha() and text.isascii()}
    return sorted(words) if len(words) >= 100 else []
