"""The router is told the blocks of every prompt, by the names that workers give them."""

from __future__ import annotations

from typing import Any

import pytest

from core import types as t
from core.kv import hash_blocks
from gateway.prompt_blocks import PromptBlocks
from tests.support.scripted import Fault, Script
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.conftest import OpenSite, Site

BLOCK = 4
STEPS = [[one] for one in ids_of("hello world")]


async def told(site: Site) -> None:
    """The gateway has heard of the model's block size."""
    site.cluster.models = (t.ModelRecord(name="m", format_hash="f", block_size=BLOCK, max_context=64, vocab_size=512),)
    await site.gateway.reporter.report()


def names(request: t.GenerateRequest, *more: int) -> tuple[bytes, ...]:
    """As the engine of a worker makes them."""
    return tuple(hash_blocks((*request.prompt_token_ids, *more), BLOCK, salt=request.cache_salt))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi there, you"}], "cache_salt": "mine"}),
        ("/v1/completions", {"prompt": "once upon a time"}),
        ("/v1/completions", {"prompt": ["once upon a time", "there was a", [5, 6, 7, 8, 9]]}),
        ("/v1/completions", {"prompt": "once upon a time" * 8, "truncate_prompt_tokens": 13}),
        ("/v1/completions", {"prompt": "x" * 40, "user": "y" * 3000}),
    ],
    ids=["chat", "text", "list", "truncated", "in a text thread"],
)
async def test_every_prompt_is_placed_with_the_names_of_its_blocks(
    open_site: OpenSite, path: str, body: dict[str, Any], n: int
) -> None:
    async with open_site(Script(steps=STEPS, others=[STEPS, STEPS])) as site:
        await told(site)
        assert (await site.client.post(path, {"model": "m", "n": n, **body})).status == 200
        requests = {request.request_id: request for request in site.cluster.requests}
        for place in site.cluster.places:
            assert len(place.block_hashes) == place.num_prompt_tokens // BLOCK > 0
            assert place.block_hashes == names(requests[place.request_id])


async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole(open_site: OpenSite) -> None:
    async with open_site() as site:
        await told(site)
        await site.client.post("/v1/completions", {"model": "m", "prompt": "once upon a time", "prompt_logprobs": 1})
        assert [place.block_hashes for place in site.cluster.places] == [()]


async def test_without_a_word_of_the_router_requests_are_placed_all_the_same(open_site: OpenSite) -> None:
    async with open_site() as site:
        assert (await site.client.post("/v1/completions", {"model": "m", "prompt": "once upon"})).status == 200
        assert [place.block_hashes for place in site.cluster.places] == [()]


async def test_a_retry_names_the_blocks_of_what_was_accepted_too(open_site: OpenSite) -> None:
    async with open_site(Script(steps=STEPS, faults={1: Fault(fail_at=9)}, num_decodes=2)) as site:
        await told(site)
        assert (await site.client.post("/v1/completions", {"model": "m", "prompt": "once"})).status == 200
        request, retry = site.cluster.requests[0], site.cluster.places[1]
        assert retry.block_hashes == names(request, *ids_of("hello world")[:9])
        assert len(retry.block_hashes) > len(site.cluster.places[0].block_hashes)


@pytest.mark.parametrize("num_prompt", [0, 3, 4, 9])
@pytest.mark.parametrize("num_accepted", [0, 1, 3, 4, 11])
def test_the_names_behind_the_prompt_continue_its_chain(num_prompt: int, num_accepted: int) -> None:
    prompt, accepted = list(range(num_prompt)), list(range(50, 50 + num_accepted))
    blocks = PromptBlocks.of(prompt, block_size=BLOCK, salt="s")
    assert blocks.with_answer(prompt, accepted) == tuple(hash_blocks([*prompt, *accepted], BLOCK, salt="s"))
