"""An answer goes on behind any of its tokens as if nothing had happened, whatever option it is under: the next attempt
is given what was accepted, and counts from the prompt's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from core import types as t
from core.grammar import GrammarKind, GrammarSource
from tests.integration.test_choices import Asker, _asker, prompt

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 14
KEPT = (1, 6, 12)
"""Within the prompt's last block, behind it, and but for the last two: one would be P's alone."""
EOS = 2
EVEN = tuple((token, 4.0) for token in range(20, 90, 2))

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "top k, top p, min p": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties of the answer": {"presence_penalty": 1.5, "frequency_penalty": 0.8, "logit_bias": EVEN[:3]},
    "penalty of prompt and answer": {"temperature": 0.0, "repetition_penalty": 1.8},
    "bias": {"logit_bias": EVEN},
    "bad words": {"allowed_token_ids": (40, 41, 42, 43), "bad_words": ((40,), (41, 42), (42, 43, 41))},
    "min tokens": {"allowed_token_ids": (40, EOS), "min_tokens": 10, "eos_token_ids": (EOS,), "ignore_eos": False},
    "stop ids": {"allowed_token_ids": (40, 41, 50), "min_tokens": 9, "stop_token_ids": (50,)},
    "logprobs": {"logprobs": 3},
    "a grammar": {
        "grammar": GrammarSource(kind=GrammarKind.REGEX, source="[A-D]{5}[K-N]{5}[P-S]{4}").encode(),
        "ignore_eos": False,
        "eos_token_ids": (EOS,),
        "logprobs": 1,
    },
}


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    async for asker in _asker():
        yield asker


@pytest.mark.parametrize("option", OPTIONS)
async def test_it_goes_on_to_the_same_answer(asker: Asker, option: str) -> None:
    options = {"n": 2, "max_tokens": NUM_TOKENS, **OPTIONS[option]}
    for worker in (asker.p, asker.d):  # compiled before, without the limit that a request has for it
        if worker is not None and "grammar" in options:
            await asyncio.wrap_future(worker.context.engine.grammars.submit(options["grammar"]))
    whole = await asker.ask(asker.request(prompt(10), (0, 1), **options))
    assert max(len(tokens) for tokens in whole.tokens.values()) > KEPT[1], "there is something to go on with"
    number = 1
    for choice, tokens in whole.tokens.items():
        for kept in (kept for kept in KEPT if kept < len(tokens) - 1):
            for mode in t.Mode:
                number += 1
                accepted = tuple(tokens[:kept])
                request = asker.request(prompt(10), (choice,), accepted=accepted, attempt=number, **options)
                rest = await asker.ask(request, mode)
                assert rest.tokens[choice] == tokens[kept:], (choice, kept, mode)
                assert rest.logprobs[choice] == whole.logprobs[choice][kept:], (choice, kept, mode)
                assert rest.finished[choice] is whole.finished[choice]
