"""The made-up tokenizer with the marks of calls and reasoning in its vocabulary, as special tokens or not."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken

from modelfiles import Tokenizer
from tests.support.tiny_tokenizer import rust_tokenizer


@cache
def marked_tokenizer(*marks: str, special: bool) -> Tokenizer:
    built = rust_tokenizer()
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    if special:
        built.add_special_tokens(added)
    else:
        built.add_tokens(added)
    return Tokenizer(built, "tiny with marks")
