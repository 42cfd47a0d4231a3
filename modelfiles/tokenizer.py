"""Text to token ids and back, over the Rust `tokenizers` library.

Two encoders share one vocabulary. The *full* one finds special tokens in the text; the *plain* one has none, so
whatever a user typed stays ordinary text. Decoding is by bytes: every token stands for a fixed byte string, and a text
is the UTF-8 reading of the joined bytes (`errors="replace"`, as the Rust decoder does). That is what makes incremental
detokenising exact: appending a token appends its bytes and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import orjson
import tokenizers

from modelfiles.added_texts import AddedTexts
from modelfiles.errors import ModelFileError

REMEDY = "use a model with a byte-level BPE or byte-fallback tokenizer"

_SPACES = re.compile(r"\s+")

PLACELESS = frozenset({"ByteLevel", "Digits", "Sequence", "Split"})
"""Kinds of pre-tokenizers to which the beginning of a text is a place like any other."""

Alphabet = Literal["byte_level", "byte_fallback"]


class Tokenizer:
    """One model's tokenizer. Immutable after construction; safe to call from several threads.

    `num_tokens` is the number of ids the tokenizer knows; a model's (padded) vocabulary may be larger, and ids in the
    padding decode to nothing.
    """

    def __init__(self, full: tokenizers.Tokenizer, path: str) -> None:
        self.path = path
        self._full = full
        serialized = full.to_str()
        self.digest = hashlib.sha256(serialized.encode("utf-8", "surrogatepass")).hexdigest()
        parsed = json.loads(serialized)
        self._added: dict[str, int] = {one["content"]: one["id"] for one in parsed["added_tokens"]}
        self._special_ids = frozenset(one["id"] for one in parsed["added_tokens"] if one["special"])
        self._alphabet = _alphabet(parsed["decoder"], path)
        self._plain = _without_added_tokens(parsed, path)
        self.added = AddedTexts(self._added)
        """Texts of all added tokens (special or not): what user content must never be parsed as."""
        self._strips = {one["content"]: (one["lstrip"], one["rstrip"]) for one in parsed["added_tokens"]}
        self._is_piecewise = _is_piecewise(parsed)
        self._known: dict[str, tuple[int, ...]] = {}
        self._strips_leading_space = _strips_leading_space(parsed["decoder"])
        vocab = full.get_vocab(with_added_tokens=True)
        self.num_tokens = max(vocab.values()) + 1
        self._bytes = self._byte_table(vocab)

    # --- encoding -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. With `parse_special`, special-token text in it becomes control ids; without, never.

        `add_special_tokens` adds what the model's files ask for around a text (a BOS, say); for many models nothing.
        """
        if parse_special and self._known and not add_special_tokens:
            return self._encode_around_known(text)
        return self._encode_whole(text, parse_special=parse_special, add_special_tokens=add_special_tokens)

    def _encode_whole(self, text: str, *, parse_special: bool, add_special_tokens: bool = False) -> list[int]:
        encoder = self._full if parse_special else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def remember(self, text: str, user_text: str) -> None:
        """Keeps the ids of what stands between the special tokens of a rendered conversation and is not the user's: the
        template's own words, the same in every prompt. Nothing that a user wrote is kept, whose repetition would show
        in the time that it takes."""
        if not self._is_piecewise:
            return
        position = 0
        for match in [*self.added.occurrences(text), None]:
            piece = text[position : match.start() if match else len(text)]
            if piece and user_text not in piece:
                self._known[piece] = tuple(self._encode_whole(piece, parse_special=False))
            position = match.end() if match else len(text)

    def _encode_around_known(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        known = self._known
        for match in self.added.occurrences(text):
            start = match.start()
            if start > position:
                piece = text[position:start]
                ids += known.get(piece) or self._encode_whole(piece, parse_special=False)
            ids.append(self._added[match[0]])
            position = match.end()
        if position < len(text):
            piece = text[position:]
            ids += known.get(piece) or self._encode_whole(piece, parse_special=False)
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Like `encode(parse_special=True)`, but a special token interrupted by `mark` stays text; marks vanish.

        Text between two special tokens is encoded as one piece, so ids equal those of the unmarked text wherever no
        mark interrupts a special token.
        """
        if mark not in text:
            return self.encode(text, parse_special=True)
        ids: list[int] = []
        position = 0
        for match in self.added.occurrences(text):
            if match.start() < position:
                continue  # white space that the token before has swallowed
            before = text[position : match.start()]
            swallows_before, swallows_behind = self._strips[match[0]]
            ids += self._encode_piece(before.rstrip() if swallows_before else before, mark)
            ids.append(self._added[match[0]])
            position = match.end()
            if swallows_behind and (spaces := _SPACES.match(text, position)):
                position = spaces.end()
        ids += self._encode_piece(text[position:], mark)
        return ids

    def _encode_piece(self, piece: str, mark: str) -> list[int]:
        piece = piece.replace(mark, "")
        return self.encode(piece, parse_special=False) if piece else []

    # --- special tokens -------------------------------------------------------------------------------------------

    def added_id(self, text: str) -> int | None:
        """The id of the added token written `text`, or None: a stop given as such a text is a stop id."""
        return self._added.get(text)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    # --- decoding -------------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; b"" for ids in the vocabulary's padding."""
        return self._bytes[token_id] if 0 <= token_id < self.num_tokens else b""

    def token_text(self, token_id: int) -> str:
        """Readable text of one token; an incomplete character shows as U+FFFD (the bytes are the truth)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def ordinary_texts(self) -> dict[int, str]:
        """The texts of all tokens that are whole characters and not special."""
        texts = {}
        for token_id, raw in enumerate(self._bytes):
            if token_id not in self._special_ids:
                with suppress(UnicodeDecodeError):
                    texts[token_id] = raw.decode("utf-8")
        return texts

    @cached_property
    def json_texts(self) -> tuple[bytes | None, ...]:
        """By token id, what `ordinary_texts` has of it as it stands between the quotes of a JSON string."""
        texts = self.ordinary_texts
        return tuple(orjson.dumps(texts[one])[1:-1] if one in texts else None for one in range(self.num_tokens))

    @property
    def strips_leading_space(self) -> bool:
        """The first space of a decoded text belongs to the tokenizer, not to the text."""
        return self._strips_leading_space

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`. Ids outside the vocabulary add nothing."""
        pieces = [self.token_bytes(one) for one in token_ids if not (skip_special_tokens and one in self._special_ids)]
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def _byte_table(self, vocab: dict[str, int]) -> tuple[bytes, ...]:
        table = [b""] * self.num_tokens
        to_bytes = _byte_level_bytes if self._alphabet == "byte_level" else _byte_fallback_bytes
        for text, token_id in vocab.items():
            table[token_id] = to_bytes(text)
        for text, token_id in self._added.items():
            table[token_id] = text.encode("utf-8")
        return tuple(table)


def _byte_level_alphabet() -> dict[str, int]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the others for code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[one] for one in text)
    except KeyError:
        return text.encode("utf-8")


def _byte_fallback_bytes(text: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
    return bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode("utf-8")


def _steps(decoder: object, members: str = "decoders") -> list[dict[str, object]]:
    """A decoder (or another component) and what it is made of."""
    steps: list[dict[str, object]] = []
    pending = [decoder]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            steps.append(one)
            pending += one.get(members, [])
    return steps


def _is_piecewise(parsed: dict[str, Any]) -> bool:
    """Whether added tokens are found as they stand, and text between them is encoded without regard to its place."""
    plain = ("normalized", "single_word", "lstrip", "rstrip")
    kinds = {step.get("type") for step in _steps(parsed["pre_tokenizer"], "pretokenizers")}
    has_plain_tokens = not any(one[flag] for one in parsed["added_tokens"] for flag in plain)
    return has_plain_tokens and parsed["normalizer"] is None and kinds <= PLACELESS


def _strips_leading_space(decoder: object) -> bool:
    return any(step.get("type") == "Strip" and step.get("content") == " " for step in _steps(decoder))


def _alphabet(decoder: object, path: str) -> Alphabet:
    kinds = [step.get("type") for step in _steps(decoder)]
    if "ByteLevel" in kinds:
        return "byte_level"
    if "ByteFallback" in kinds:
        return "byte_fallback"
    raise ModelFileError(path, "has a tokenizer whose decoder is not known here", REMEDY)


def _without_added_tokens(parsed: dict[str, object], path: str) -> tokenizers.Tokenizer:
    """The same tokenizer minus its added tokens, which then are ordinary text to it."""
    return parsed_tokenizer(json.dumps({**parsed, "added_tokens": []}).encode(), path)


def parsed_tokenizer(content: bytes, path: str) -> tokenizers.Tokenizer:
    """Of a tokenizer.json. Raises ModelFileError for what the Rust library refuses, or trips over."""
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - it raises nothing narrower, and its panics are no Exception
        reason = str(error)[:200]
        raise ModelFileError(path, f"is no readable tokenizer ({reason})", "download the file again") from None
