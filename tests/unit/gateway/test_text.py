"""The laws of the text layer, for any tokens in any grouping."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types import FinishReason, TokenLogprobs
from gateway.text import ChoiceText, Detokenizer, TextDelta, TextRules
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.added_id(EOS_TEXT)
assert EOS is not None

any_ids = st.lists(st.integers(0, TOKENIZER.num_tokens - 1), max_size=40)
texts = st.text(st.sampled_from("ab<|> \n\u00e9\u6f22\U0001f999"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab<|\u00e9\u6f22"), min_size=1, max_size=4), max_size=4, unique=True)


def grouped(items: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    groups, rest = [], list(items)
    for cut in cuts:
        groups.append(rest[:cut])
        rest = rest[cut:]
    return [*groups, rest]


def play(
    groups: Sequence[Sequence[int]], rules: TextRules, finish: FinishReason = FinishReason.LENGTH
) -> list[TextDelta]:
    text = ChoiceText(TOKENIZER, rules)
    deltas = []
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        deltas.append(text.append(group, finish_reason=finish if is_last else None))
        if text.finish_reason is not None:
            break
    return deltas


def joined(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def expected(ids: Sequence[int], rules: TextRules) -> tuple[str, str | None, int]:
    """Character by character, over the whole text each time: (text, matched stop, accepted tokens)."""
    sent = ""
    for num_tokens in range(1, len(ids) + 1):
        whole = stable_prefix(ids[:num_tokens], is_end=False)
        for end in range(len(sent) + 1, len(whole) + 1):
            matches = [stop for stop in rules.stop if whole[:end].endswith(stop)]
            if matches and num_tokens >= rules.min_tokens:
                stop = max(matches, key=len)
                return whole[: end if rules.include_stop else end - len(stop)], stop, num_tokens
        sent = whole
    whole = stable_prefix(ids, is_end=True)
    for end in range(len(sent) + 1, len(whole) + 1):
        matches = [stop for stop in rules.stop if whole[:end].endswith(stop)]
        if matches and len(ids) >= rules.min_tokens:
            stop = max(matches, key=len)
            return whole[: end if rules.include_stop else end - len(stop)], stop, len(ids)
    return whole, None, len(ids)


def stable_prefix(ids: Sequence[int], *, is_end: bool) -> str:
    raw = b"".join(b"" if TOKENIZER.is_special(one) else TOKENIZER.token_bytes(one) for one in ids)
    if is_end:
        return raw.decode("utf-8", "replace")
    for cut in range(4):
        # What is certain now: the longest decoding that no continuation can change.
        head, tail = raw[: len(raw) - cut], raw[len(raw) - cut :]
        if could_continue(tail):
            return head.decode("utf-8", "replace")
    return raw.decode("utf-8", "replace")


def could_continue(tail: bytes) -> bool:
    """Whether `tail` is a non-empty proper prefix of some UTF-8 character."""
    return any(tail == one[: len(tail)] for one in characters_beginning_with(tail)) if tail else False


def characters_beginning_with(tail: bytes) -> list[bytes]:
    if len(tail) > 3:
        return []
    second = [bytes([byte]) for byte in range(0x80, 0xC0)]
    found = []
    for size in range(len(tail) + 1, 5):
        missing = size - len(tail)
        candidates = [tail + one + b"\x80" * (missing - 1) for one in second]
        found += [one for one in candidates if is_one_character(one)]
    return found


def is_one_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(any_ids, st.booleans())
def test_incremental_decoding_equals_decoding_at_once(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    pieces = [detokenizer.append(one) for one in ids]
    assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(texts)
def test_no_piece_holds_a_replacement_mark_that_the_text_has_not(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    assert all("\ufffd" not in detokenizer.append(one) for one in ids_of(text))
    assert detokenizer.finish() == ""


@settings(max_examples=300)
@given(any_ids | texts.map(ids_of), stops, st.integers(0, 12), st.booleans(), st.lists(st.integers(0, 5), max_size=12))
def test_text_and_end_are_the_same_for_any_grouping(
    ids: list[int], stop: list[str], min_tokens: int, include: bool, cuts: list[int]
) -> None:
    rules = TextRules(stop=tuple(stop), min_tokens=min_tokens, include_stop=include)
    deltas = play(grouped(ids, cuts), rules)
    text, matched, num_tokens = expected(ids, rules)
    assert joined(deltas) == text
    assert deltas[-1].stop_reason == matched
    assert deltas[-1].finish_reason is (FinishReason.LENGTH if matched is None else FinishReason.STOP)
    assert sum(len(delta.token_ids) for delta in deltas) == num_tokens


@settings(max_examples=200)
@given(texts, stops)
def test_what_may_still_become_a_stop_is_held_and_nothing_else(text: str, stop: list[str]) -> None:
    choice = ChoiceText(TOKENIZER, TextRules(stop=tuple(stop)))
    ids, sent = ids_of(text), ""
    for num_tokens, one in enumerate(ids, start=1):
        sent += choice.append([one]).text
        if choice.finish_reason is not None:
            break
        whole = stable_prefix(ids[:num_tokens], is_end=False)
        beginnings = [s[:n] for s in stop for n in range(1, len(s))]
        num_held = max((len(one) for one in beginnings if whole.endswith(one)), default=0)
        assert sent == whole[: len(whole) - num_held]


def test_held_text_is_sent_when_the_run_ends_by_length() -> None:
    deltas = play([ids_of("a<|im"), []], TextRules(stop=("<|im_end|>",)))
    assert [delta.text for delta in deltas] == ["a", "<|im"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_failed_match_frees_what_was_held() -> None:
    choice = ChoiceText(TOKENIZER, TextRules(stop=("aab",)))
    assert [choice.append([one]).text for one in ids_of("aaac")] == ["", "", "a", "aac"]


@pytest.mark.parametrize(("num_tokens", "text"), [(1, "\ufffd"), (2, "\ufffd"), (3, "\ufffd"), (4, "\U0001f999")])
def test_a_run_cut_inside_a_character_ends_with_one_replacement_mark(num_tokens: int, text: str) -> None:
    ids = ids_of("\U0001f999")[:num_tokens]
    assert joined(play([ids], TextRules())) == joined(play([[one] for one in ids], TextRules())) == text


def test_a_stop_before_the_minimum_does_not_count_and_the_next_one_does() -> None:
    deltas = play([ids_of("ab.cd.ef")], TextRules(stop=(".",), min_tokens=5))
    assert joined(deltas) == "ab.cd"
    assert (deltas[-1].stop_reason, len(deltas[-1].token_ids), deltas[-1].num_overrun) == (".", 6, 2)


def test_log_probabilities_stay_with_their_tokens_when_text_is_held_or_cut() -> None:
    ids = ids_of("ab<x>cd")
    logprobs = [TokenLogprobs(logprob=-float(index), rank=1) for index in range(len(ids))]
    choice = ChoiceText(TOKENIZER, TextRules(stop=("<x>",)))
    first = choice.append(ids[:3], logprobs[:3])
    last = choice.append(ids[3:], logprobs[3:])
    assert (first.text, last.text) == ("ab", "")
    assert first.token_ids + last.token_ids == tuple(ids[:5])
    assert first.logprobs + last.logprobs == tuple(logprobs[:5])
    assert first.offsets + last.offsets == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, True, "a"), (True, True, "a"), (True, False, "a<|im_end|>")]
)
def test_the_stop_token_shows_only_when_stops_and_special_tokens_are_asked_for(
    include: bool, skip: bool, text: str
) -> None:
    choice = ChoiceText(TOKENIZER, TextRules(include_stop=include, skip_special_tokens=skip))
    delta = choice.append([*ids_of("a"), EOS], finish_reason=FinishReason.STOP, stop_token_id=EOS, is_callers_stop=True)
    assert (delta.text, delta.stop_reason, len(delta.token_ids)) == (text, EOS, 2)


def test_the_models_own_end_is_no_stop_reason() -> None:
    delta = ChoiceText(TOKENIZER, TextRules()).append([EOS], finish_reason=FinishReason.STOP, stop_token_id=EOS)
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, None)


def test_of_stops_completed_by_one_character_the_longest_is_reported() -> None:
    delta = play([ids_of("xabcy")], TextRules(stop=("c", "abc", "bc")))[-1]
    assert (delta.text, delta.stop_reason) == ("x", "abc")
