"""Structured output and prompt scores through a whole cluster: the same in both modes, refused before the status
line."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.support.cluster import ProcessCluster

SPLIT, LOCAL = "split-model", "local-model"
TWO_MODELS = (
    f"models.0.name={SPLIT}",
    "models.0.pools={prefill: {max_step_tokens: 256}, decode: {max_step_tokens: 512, max_sequences: 12}}",
    f"models.1={{name: {LOCAL}, pools: {{unified: {{max_step_tokens: 384, max_sequences: 7}}}}, "
    "kv: {num_blocks: 400}}",
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
ASK = [{"role": "user", "content": "Give a person"}]
pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessCluster]:
    async with ProcessCluster(tmp_path_factory.mktemp("cluster"), *TWO_MODELS) as cluster:
        yield cluster


async def chat(cluster: ProcessCluster, **body: Any) -> dict[str, Any]:
    reply = await cluster.http.post("/v1/chat/completions", json={"messages": ASK, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


ASKED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": PERSON_FORMAT, "max_tokens": 60},
    "schema, sampled": {"response_format": PERSON_FORMAT, "max_tokens": 60, "temperature": 1.0, "seed": 5},
    "free white space": {"structured_outputs": {"json": PERSON, "disable_any_whitespace": False}, "max_tokens": 200},
    "choice": {"structured_outputs": {"choice": ["a\U0001f999b\u6f22\u5b57\u00e9", "no"]}, "max_tokens": 40},
    "regex": {
        "structured_outputs": {"regex": "[0-9]{3}-[A-Z]{2}"},
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "ebnf": {"guided_grammar": 'root ::= "(" root ")" | "x"', "max_tokens": 40},
    "ends at the first token": {"structured_outputs": {"choice": ["x"]}, "max_tokens": 1},
    "minimum length": {"structured_outputs": {"regex": "[a-z]+"}, "min_tokens": 8, "max_tokens": 12},
    "stop text": {"structured_outputs": {"choice": ["one two three"]}, "stop": ["two"], "max_tokens": 20},
}


async def test_structured_answers_are_the_same_in_both_modes(cluster: ProcessCluster) -> None:
    async def all_of(model: str) -> dict[str, dict[str, Any]]:
        answers = await asyncio.gather(*[chat(cluster, model=model, **body) for body in ASKED.values()])
        return {name: answer["choices"][0] for name, answer in zip(ASKED, answers, strict=True)}

    split, local = await all_of(SPLIT), await all_of(LOCAL)
    assert split == local
    texts = {name: choice["message"]["content"] for name, choice in split.items()}
    reasons = {name: choice["finish_reason"] for name, choice in split.items()}
    for name in ("schema", "schema, sampled", "free white space"):
        jsonschema.validate(json.loads(texts[name]), PERSON)
        assert reasons[name] == "stop"
    assert texts["choice"] in ("a\U0001f999b\u6f22\u5b57\u00e9", "no")
    assert texts["ebnf"] == "(" * texts["ebnf"].count("(") + "x" + ")" * texts["ebnf"].count(")")
    assert (texts["ends at the first token"], reasons["ends at the first token"]) == ("x", "length")
    assert len(texts["minimum length"]) >= 8
    assert texts["stop text"] == "one "
    for one in split["regex"]["logprobs"]["content"]:
        assert one["logprob"] > -9999.0
        assert len(one["top_logprobs"]) == 2, "raw scores: what the grammar forbids is among them"


async def test_a_streamed_answer_is_the_plain_one(cluster: ProcessCluster) -> None:
    body = {"model": SPLIT, "messages": ASK, "temperature": 0, "response_format": PERSON_FORMAT, "max_tokens": 60}
    assert await cluster.streamed_text(body) == text_of(await chat(cluster, **body))


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "(a"},
        {"guided_grammar": "root ::= missing"},
        {"guided_json": {"$ref": "#/$defs/missing"}},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "string", "pattern": "("}},
        {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "no"}}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [SPLIT, LOCAL])
async def test_what_only_the_compiler_sees_is_a_400_before_the_status_line(
    cluster: ProcessCluster, body: dict[str, Any], stream: bool, model: str
) -> None:
    reply = await cluster.http.post(
        "/v1/chat/completions", json={"model": model, "messages": ASK, "stream": stream, "max_tokens": 5, **body}
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.soak
@pytest.mark.parametrize("model", [SPLIT, LOCAL])
async def test_a_grammar_without_end_is_a_400_and_other_requests_go_on_meanwhile(
    cluster: ProcessCluster, model: str
) -> None:
    bomb = "|".join(f"[^a]{{1,{index + 5}}}x{index}" for index in range(300))
    body = {"model": model, "messages": ASK, "guided_regex": bomb, "max_tokens": 5}

    async def ask() -> httpx.Response:
        while True:
            reply = await cluster.http.post("/v1/chat/completions", json=body)
            if reply.status_code not in (429, 503):  # a busy machine is still trying it
                return reply

    asked = asyncio.ensure_future(ask())
    num_answered = 0
    while not asked.done():
        choice = f"answer {num_answered}"  # a grammar of its own: none is remembered
        answer = await chat(cluster, model=model, guided_choice=[choice], max_tokens=12)
        assert text_of(answer) == choice
        num_answered += 1
    reply = await asked
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "guided_regex"
    assert "make it smaller" in reply.json()["error"]["message"]
    assert num_answered > 1
    print(f"{model}: {num_answered} others were answered meanwhile")


async def test_prompt_scores_are_the_same_in_both_modes_and_computed_afresh(cluster: ProcessCluster) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 12

    async def scores(model: str) -> list[Any]:
        body = {"model": model, "prompt": prompt, "prompt_logprobs": 2, "max_tokens": 2, "temperature": 0}
        reply = await cluster.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        found: list[Any] = answer["choices"][0]["prompt_logprobs"]
        assert len(found) == answer["usage"]["prompt_tokens"]
        return found

    split = await scores(SPLIT)
    assert split == await scores(LOCAL) == await scores(SPLIT), "a second time too: the cache is not used"
    assert split[0] is None
    assert all(2 <= len(one) <= 3 for one in split[1:])
