"""The SentencePiece tokenizer of a real GGUF file, against the published algorithm run over its scores."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelfiles import ChatMessage, ChatTemplate, ModelFiles, open_model
from modelfiles.gguf_file import GGUFFile

NORMAL, USER_DEFINED = 1, 4
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEXTS = (
    "Hello world 12345",
    "The quick  brown   fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n\n\n\nprint(f(2))\t# \t\ttabs",
    " leading and trailing ",
    "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f600 \U0001f469\u200d\U0001f680 \u0416\u0443\u043a",
    "bytes \x07 \x1b[0m x\u2581y \ufffd \U000e0001",
    "don't I'll 3.14 1,000",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "",
    " ",
)


@cache
def gemma() -> ModelFiles:
    return open_model("gemma3-270m")


@cache
def metadata() -> tuple[dict[str, int], list[float], re.Pattern[str]]:
    file = GGUFFile(Path(gemma().path))
    tokens, scores, types = (file.value(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list) and isinstance(scores, list) and isinstance(types, list)
    whole = sorted((text for text, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED), key=len)
    ids = {text: index for index, text in enumerate(tokens) if types[index] == NORMAL}
    for text in whole:
        ids[text] = tokens.index(text)
    return ids, scores, re.compile("(" + "|".join(map(re.escape, reversed(whole))) + ")")


def sentence_piece(text: str) -> list[int]:
    """Pieces of the user's own stand for themselves; elsewhere the pair with the best joined score, the leftmost of
    equals, is joined until there is none. What is then no piece is spelled in bytes.
    """
    ids, scores, whole = metadata()
    result: list[int] = []
    for number, part in enumerate(whole.split(text)):
        if number % 2:
            result.append(ids[part])
            continue
        symbols = list(part.replace(" ", "\u2581"))
        while True:
            joined = [(left + right, at) for at, (left, right) in enumerate(pairwise(symbols))]
            known = [(-scores[ids[piece]], at) for piece, at in joined if piece in ids]
            if not known:
                break
            _, at = min(known)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            result += [ids[symbol]] if symbol in ids else [238 + byte for byte in symbol.encode()]
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_algorithm(text: str) -> None:
    tokenizer = gemma().tokenizer()
    assert tokenizer.encode(text, parse_special=True) == sentence_piece(text)
    assert tokenizer.encode(text, parse_special=False) == sentence_piece(text)
    assert tokenizer.decode(sentence_piece(text), skip_special_tokens=True) == text.replace("\u2581", " ")


@settings(max_examples=40)
@given(st.text(st.sampled_from("aehiu tnrs  \n\t.,1<>/_\u00e9\u6f22\U0001f600"), max_size=40))
def test_ids_are_those_of_the_algorithm_for_any_text(text: str) -> None:
    assert gemma().tokenizer().encode(text, parse_special=True) == sentence_piece(text)
    assert gemma().tokenizer().decode(sentence_piece(text), skip_special_tokens=True) == text


def test_a_text_begins_with_bos_and_a_turn_ends_with_an_end_token() -> None:
    files = gemma()
    tokenizer, config = files.tokenizer(), files.config
    assert tokenizer.encode("Hi", parse_special=True, add_special_tokens=True)[0] == config.bos_token_id == 2
    assert tokenizer.added_id("<end_of_turn>") == 106
    assert config.eos_token_ids == (1, 106), "the end of a turn ends an answer though the metadata name only <eos>"
    assert tokenizer.is_special(106) and tokenizer.decode([106], skip_special_tokens=True) == ""


def test_turns_are_control_tokens_and_a_users_own_never_are() -> None:
    tokenizer = gemma().tokenizer()
    template = ChatTemplate(TURNS, "t", bos_text="<bos>")
    chat = template.encode(tokenizer, [ChatMessage(role="user", content="<end_of_turn>\n\n<div> <unused7>")]).token_ids
    counts = [chat.count(tokenizer.added_id(text) or -1) for text in ("<bos>", "<end_of_turn>", "<unused7>", "<div>")]
    assert counts == [1, 1, 0, 0]
    plain = template.encode(tokenizer, [ChatMessage(role="user", content="Hi there")])
    assert list(plain.token_ids) == tokenizer.encode(plain.text, parse_special=True)


def test_marks_are_set_quickly_in_a_vocabulary_of_thousands_of_added_tokens() -> None:
    """The searches are by the text, not by the size of the vocabulary: this took a minute before it was so."""
    text = "<div><a>x</a><end_of_turn></div>\n" * 2000
    chat = ChatTemplate(TURNS, "t").encode(gemma().tokenizer(), [ChatMessage(role="user", content=text)])
    assert chat.token_ids.count(106) == 1
