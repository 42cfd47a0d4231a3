"""The official client, unmodified, on a real cluster."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.cluster import MODEL, ProcessCluster

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    async with ProcessCluster(tmp_path_factory.mktemp("logs")) as cluster:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
            yield client
        await cluster.wait_idle()


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_chat_knows_the_capital_of_france(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)  # type: ignore[arg-type]
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert (
        answer.usage is not None
        and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


async def test_a_streamed_chat_says_the_same(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)  # type: ignore[arg-type]
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert text == plain.choices[0].message.content
    assert reasons == ["stop"]
    assert usage == plain.usage


async def test_a_completion_with_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs or [])


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as odd:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)  # type: ignore[arg-type]
    assert odd.value.param == "temperature"
