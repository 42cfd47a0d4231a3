"""An echoed prompt and its log probabilities, in all forms of a prompt and of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from core import types as t
from tests.support.scripted import Script
from tests.support.tiny_tokenizer import START_TEXT, ids_of, tiny_tokenizer
from tests.unit.gateway.conftest import OpenSite

TEXT = "/v1/completions"
START = tiny_tokenizer().added_id(START_TEXT) or 0
SCORE = t.TokenLogprobs(logprob=-0.5, rank=2, top=((5, -0.25),))


@pytest.mark.parametrize("mode", list(t.Mode))
@pytest.mark.parametrize(("max_tokens", "said"), [(0, ""), (4, "!?")])
@pytest.mark.parametrize("prompt", ["say \U0001f999", ids_of("say \U0001f999"), [START, *ids_of("x")], "y"])
async def test_an_echo_is_the_prompt_and_its_scores(
    open_site: OpenSite, prompt: Any, max_tokens: int, said: str, mode: t.Mode
) -> None:
    shown = prompt if isinstance(prompt, str) else tiny_tokenizer().decode(prompt, skip_special_tokens=True)
    ids = tiny_tokenizer().encode(prompt, parse_special=True) if isinstance(prompt, str) else prompt
    body = {"model": "m", "prompt": [prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    steps = [[one] for one in ids_of("!?")]
    async with open_site(Script(steps=steps, mode=mode, logprobs=lambda token_id: SCORE)) as site:
        answer = (await site.client.post(TEXT, body)).json()
        options = {"include_usage": True}
        events = (await site.client.post(TEXT, {**body, "stream": True, "stream_options": options})).events()[:-1]
    assert answer["usage"] == events[-1]["usage"]
    assert answer["usage"]["completion_tokens"] == 2 * len(said)
    for index, choice in enumerate(answer["choices"]):
        assert (choice["text"], choice["finish_reason"]) == (shown + said, "length")
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(ids) + len(said)}
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        assert lists["token_logprobs"][1:] == [-0.5] * (len(ids) + len(said) - 1)
        assert lists["text_offset"] == sorted(lists["text_offset"])
        assert lists["text_offset"][len(ids) :] == [len(shown), len(shown) + 1][: len(said)]
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in parts) == choice["text"]
        streamed = {name: [v for one in parts if one["logprobs"] for v in one["logprobs"][name]] for name in lists}
        assert streamed == lists
