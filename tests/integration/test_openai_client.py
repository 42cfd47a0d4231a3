"""The official client, unmodified, on a real cluster."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from tests.support.cluster import MODEL, ProcessCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
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


# -- several choices, scores, tools, structured output ----------------------------------------------------------------


class Person(BaseModel):
    name: Annotated[str, Field(max_length=10)]
    age: Annotated[int, Field(ge=0, le=150)]


ASK: Any = [{"role": "user", "content": "Give a person."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]


async def test_several_choices_with_scores(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "n": 3, "temperature": 1, "seed": 4, "max_tokens": 8}
    plain = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    texts: list[str] = ["", "", ""]
    scores: list[list[Any]] = [[], [], []]
    async for chunk in await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    for whole, text, told in zip(plain.choices, texts, scores, strict=True):
        assert whole.message.content == text
        assert whole.logprobs is not None and whole.logprobs.content == told
        assert b"".join(bytes(token.bytes or []) for token in told).startswith(text.encode())
        assert all(len(token.top_logprobs) == 2 for token in told)


async def test_a_forced_call_of_a_tool(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "max_tokens": 60,
    }
    plain = await client.chat.completions.create(**asked, temperature=0)
    async with client.chat.completions.stream(**asked, temperature=0) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    for answer in (plain, final):
        assert answer.choices[0].finish_reason == "tool_calls"
        calls = answer.choices[0].message.tool_calls
        assert calls and calls[0].type == "function"
        assert calls[0].function.name == "weather"
        assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")


async def test_a_chat_parsed_into_a_class(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Person)
    plain = await client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=60, temperature=0
    )
    if plain.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


async def test_completions_of_several_prompts_streamed(client: openai.AsyncOpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    plain = await client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=5, echo=True)
    stream = await client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=5, echo=True, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in plain.choices] == texts
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))


# -- responses --------------------------------------------------------------------------------------------------------


async def test_a_response_and_its_stream_say_what_the_chat_says(client: openai.AsyncOpenAI) -> None:
    question = "What is the capital of France?"
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)  # type: ignore[arg-type]
    plain = await client.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=20)
    async with client.responses.stream(model=MODEL, input=question, temperature=0, max_output_tokens=20) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert plain.output_text == final.output_text == text == chat.choices[0].message.content
    assert plain.status == "completed"
    assert plain.usage is not None and chat.usage is not None
    assert (plain.usage.input_tokens, plain.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


async def test_a_response_parsed_into_a_class(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.parse(model=MODEL, input="Give a person.", text_format=Person, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Person)
    async with client.responses.stream(
        model=MODEL, input="Give a person.", text_format=Person, max_output_tokens=60
    ) as stream:
        assert isinstance((await stream.get_final_response()).output_parsed, Person)


async def test_a_response_that_calls_a_tool_and_goes_on(client: openai.AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_output_tokens": 60}
    async with client.responses.stream(input=items, tool_choice="required", **asked) as stream:
        final = await stream.get_final_response()
    call = final.output[0]
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in final.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 30 degrees"})
    answer = await client.responses.create(input=items, tool_choice="none", **asked)
    assert answer.output_text
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="hi", previous_response_id=final.id)
    assert refused.value.param == "previous_response_id"
