"""When a choice ends, as far as a worker can judge."""

from __future__ import annotations

from typing import Any

import pytest

from core.types import FinishReason, SamplingParams
from engine.stopping import Finish, finish_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def finish(token: int, num_generated: int, *, num_tokens: int = 50, **options: Any) -> Finish | None:
    sampling = SamplingParams(**{"max_tokens": 10, "eos_token_ids": (2,), "stop_token_ids": (7,), **options})
    return finish_of(sampling, token_id=token, num_generated=num_generated, num_tokens=num_tokens, max_context=100)


@pytest.mark.parametrize("token", [2, 7])
def test_end_and_stop_tokens_end_the_choice_and_are_named(token: int) -> None:
    assert finish(token, 3) == Finish(reason=STOP, stop_token_id=token)


def test_an_ignored_end_token_is_a_token_like_others_but_the_callers_stop_is_not() -> None:
    assert finish(2, 3, ignore_eos=True) is None
    assert finish(7, 3, ignore_eos=True) == Finish(reason=STOP, stop_token_id=7)


def test_the_last_allowed_token_ends_by_length() -> None:
    assert finish(5, 9) is None
    assert finish(5, 10) == Finish(reason=LENGTH)


def test_a_stop_token_as_the_last_allowed_one_ends_by_stop() -> None:
    assert finish(2, 10) == Finish(reason=STOP, stop_token_id=2)


def test_the_full_context_ends_by_length() -> None:
    assert finish(5, 3, num_tokens=99) is None
    assert finish(5, 3, num_tokens=100) == Finish(reason=LENGTH)


def test_no_stop_within_the_minimum() -> None:
    assert finish(2, 4, min_tokens=4) is None
    assert finish(2, 5, min_tokens=4) == Finish(reason=STOP, stop_token_id=2)
