"""A made-up byte-level tokenizer: every byte is a token, some words are longer ones, two marks are special."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from modelfiles import Tokenizer

EOS_TEXT, START_TEXT = "<|im_end|>", "<|im_start|>"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "w"), ("o", "r"), ("\u0120w", "or"))


def rust_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [START_TEXT, EOS_TEXT, *alphabet, *(left + right for left, right in MERGES)]
    built = tokenizers.Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(tokens)}, merges=list(MERGES)))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in (START_TEXT, EOS_TEXT)])
    return built


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(rust_tokenizer(), "tiny")


@cache
def bos_tokenizer() -> Tokenizer:
    """The same, but it begins a text with a mark."""
    built = rust_tokenizer()
    mark = (START_TEXT, built.token_to_id(START_TEXT))
    built.post_processor = processors.TemplateProcessing(single=f"{START_TEXT} $A", special_tokens=[mark])
    return Tokenizer(built, "tiny-bos")


@cache
def byte_ids() -> dict[int, int]:
    """Byte -> the id of the token that is just this byte."""
    tokenizer = tiny_tokenizer()
    one_byte = {tokenizer.token_bytes(one): one for one in range(tokenizer.num_tokens)}
    return {byte: one_byte[bytes([byte])] for byte in range(256)}


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return [byte_ids()[byte] for byte in text.encode()]
