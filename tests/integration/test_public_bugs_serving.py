"""Reports of users of other servers, as cases: requests that were lost, mixed, never ended or left something behind.

Through a real socket and a whole cluster of prefill and decode. Where a case needs long prompts or many tokens, the
model is a made-up one of a few thousand weights; where it is about what a model writes, it is the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from core.config import load_config
from core.failpoints import Failpoints
from core.types import Role
from engine.engine import Engine
from tests.support.local_cluster import MODEL, SETTINGS
from tests.support.served_cluster import ServedCluster, served_cluster
from tests.support.tiny_model import CONFIG, write_folder
from worker.process import load_engine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT = 256
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a cluster around the made-up model."""
    config = {**CONFIG, "max_position_embeddings": CONTEXT}
    folder = write_folder(tmp_path_factory.mktemp("tiny"), config=config)
    return (f"models.0.path={folder}", "models.0.kv.num_blocks=200")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny: tuple[str, ...]) -> AsyncIterator[ServedCluster]:
    async with served_cluster(None, *tiny, "gateway.cors.origins=['*']") as it:
        yield it


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "say it", "temperature": 0, **more}


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.005)


@contextmanager
def armed(cluster: ServedCluster, worker: str, point: str, action: str) -> Iterator[Failpoints]:
    failpoints = cluster.cluster.workers[worker].context.failpoints
    failpoints.set(point, action)
    try:
        yield failpoints
    finally:
        failpoints.set(point, "")


# -- the edge of the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_answer", [1, 15, 16, 17])
async def test_bug_026_prompt_and_answer_may_just_fill_the_context(cluster: ServedCluster, num_answer: int) -> None:
    prompt = [5] * (CONTEXT - num_answer)
    whole = await cluster.good(TEXT, text(prompt=prompt, max_tokens=num_answer, ignore_eos=True))
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == CONTEXT
    error = await cluster.refused(TEXT, text(prompt=[*prompt, 5], max_tokens=num_answer))
    assert error["code"] == "context_length_exceeded"
    await cluster.until_idle()


async def test_bug_026_a_prompt_that_fills_the_context_can_only_be_echoed(cluster: ServedCluster) -> None:
    prompt = [5] * CONTEXT
    assert (await cluster.refused(TEXT, text(prompt=prompt, max_tokens=1)))["code"] == "context_length_exceeded"
    echo = await cluster.good(TEXT, text(prompt=prompt, max_tokens=0, echo=True))
    assert (echo["choices"][0]["finish_reason"], echo["usage"]["completion_tokens"]) == ("length", 0)


async def test_bug_026_a_chat_without_a_limit_gets_what_is_left(cluster: ServedCluster) -> None:
    async def ask(length: int) -> httpx.Response:
        return await cluster.post(CHAT, chat(messages=[{"role": "user", "content": "~" * length}], ignore_eos=True))

    room = (await cluster.good("/tokenize", {"messages": [{"role": "user", "content": ""}]}))["count"]
    one = (await ask(CONTEXT - room - 1)).json()
    assert one["usage"] | {"prompt_tokens_details": 0, "completion_tokens_details": 0} == {
        "prompt_tokens": CONTEXT - 1,
        "completion_tokens": 1,
        "total_tokens": CONTEXT,
        "prompt_tokens_details": 0,
        "completion_tokens_details": 0,
    }
    assert one["choices"][0]["finish_reason"] == "length"
    assert (await ask(CONTEXT - room)).status_code == 400
    await cluster.works()


# -- the prefill leg --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_028_what_prefill_refuses_is_not_decoded(tiny: tuple[str, ...], stream: bool) -> None:
    config = load_config(overrides=[*SETTINGS, *tiny], environ={})
    short = config.models[0].model_copy(update={"max_context": 64})
    engines = {
        "prefill-0": load_engine(config, short, Role.PREFILL),
        "decode-0": load_engine(config, config.models[0], Role.DECODE),
    }
    async with served_cluster(engines, *tiny) as cluster:
        error = await cluster.refused(TEXT, text(prompt=[5] * 100, max_tokens=20, stream=stream))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert cluster.num_generated("decode-0") == 0
        await cluster.works()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", ["prefill.computing", "prefill.seal"])
async def test_bug_028_a_prefill_that_fails_half_way_is_made_good(
    cluster: ServedCluster, stream: bool, point: str
) -> None:
    """The gateway tries again elsewhere: what the client gets is the right answer, never one made of half a prompt."""
    body = text(max_tokens=20, ignore_eos=True)
    right = (await cluster.good(TEXT, body))["choices"][0]["text"]
    with armed(cluster, "prefill-0", point, "error:backend_failed") as failpoints:
        before = failpoints.num_hits(point)
        if stream:
            events = await cluster.events(TEXT, body)
            answer = "".join(choice["text"] for event in events for choice in event["choices"])
        else:
            answer = (await cluster.good(TEXT, body))["choices"][0]["text"]
        assert failpoints.num_hits(point) > before
    assert answer == right
    await cluster.works()


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_059_prefill_makes_one_token_whatever_the_limit(cluster: ServedCluster, stream: bool) -> None:
    for limit in ({"max_completion_tokens": 60}, {"max_tokens": 60}, {"max_completion_tokens": 60, "max_tokens": 5}):
        before = cluster.num_generated("prefill-0"), cluster.num_generated("decode-0")
        if stream:
            options = {"include_usage": True}
            usage = (await cluster.events(CHAT, chat(ignore_eos=True, stream_options=options, **limit)))[-1]["usage"]
        else:
            usage = (await cluster.good(CHAT, chat(ignore_eos=True, **limit)))["usage"]
        assert usage["completion_tokens"] == 60
        assert cluster.num_generated("prefill-0") == before[0] + 1
        assert cluster.num_generated("decode-0") == before[1] + 59
    await cluster.until_idle()


COMBINATIONS: list[dict[str, Any]] = [
    {"min_tokens": 10, "max_tokens": 20},
    {"min_tokens": 20, "max_tokens": 20},
    {"min_tokens": 10, "max_tokens": 20, "stop": ["a", "e", " "]},
    {"min_tokens": 10, "max_tokens": 20, "logprobs": 2},
    {"min_tokens": 10, "max_tokens": 20, "echo": True},
    {"min_tokens": 10, "max_tokens": 20, "best_of": 1},
    {"min_tokens": 10, "max_tokens": 20, "temperature": 1, "seed": 3, "n": 2},
    {"min_tokens": 10, "max_tokens": 20, "guided_regex": "[a-z]{10,20}"},
]


async def test_bug_061_a_least_number_of_tokens_is_no_matter_of_prefill(tiny: tuple[str, ...]) -> None:
    async def answers(mode: str) -> list[Any]:
        found: list[Any] = []
        async with served_cluster(None, *tiny, f"router.mode={mode}") as cluster:
            for body in COMBINATIONS:
                plain = await cluster.good(TEXT, text(**body, return_token_ids=True))
                assert all(len(choice["token_ids"]) >= 10 for choice in plain["choices"]), body
                found.append((plain["choices"], plain["usage"]["completion_tokens"]))
                events = await cluster.events(TEXT, text(**body))
                joined = ["" for _ in plain["choices"]]
                for event in events:
                    for choice in event["choices"]:
                        joined[choice["index"]] += choice["text"]
                assert joined == [choice["text"] for choice in plain["choices"]], body
            is_split = cluster.num_generated("prefill-0") > 0
            assert is_split == (mode == "split")
        return found

    assert await answers("split") == await answers("local")


@pytest.mark.parametrize("include_usage", [True, False])
async def test_bug_062_options_of_the_stream_do_not_keep_a_request_from_prefill(
    cluster: ServedCluster, include_usage: bool
) -> None:
    plain = await cluster.good(CHAT, chat(max_tokens=5))
    context = cluster.cluster.workers["prefill-0"].context
    before = context.engine.counters().tokens_generated
    options = {"include_usage": include_usage}
    answer = await cluster.post(
        CHAT, chat(max_tokens=5, stream=True, stream_options=options), headers={"x-baton-timing": "1"}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    [timing] = [event["timing"] for event in events if "timing" in event]
    assert (timing["mode"], timing["attempts"]) == ("split", 1)
    assert timing["transfer_bytes"] > 0
    assert context.engine.counters().tokens_generated == before + 1
    if include_usage:
        assert events[-1]["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    await cluster.until_idle()


# -- clients that leave -----------------------------------------------------------------------------------------------

BODIES = {"plain": text(**LONG), "streamed": text(**LONG, stream=True), "chat": chat(**LONG, stream=True)}


class Leaver:
    """A client that closes its socket when told to."""

    def __init__(self, cluster: ServedCluster, body: dict[str, Any]) -> None:
        self._cluster = cluster
        self._body = body

    async def __aenter__(self) -> Leaver:
        url = self._cluster.http.base_url
        self.reader, self._writer = await asyncio.open_connection(url.host, url.port)
        raw = json.dumps(self._body).encode()
        path = CHAT if "messages" in self._body else TEXT
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        self._writer.write(head.encode() + raw)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.transport.abort()


async def metrics(cluster: ServedCluster) -> dict[str, float]:
    """Of the gateway and of both workers, each from its own port; names with their labels."""
    pages = [(await cluster.http.get("/metrics")).text]
    async with httpx.AsyncClient() as client:
        urls = [f"http://{worker.http_address}/metrics" for worker in cluster.cluster.workers.values()]
        pages += [(await client.get(url)).text for url in urls]
    lines = [line for page in pages for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def matching(found: dict[str, float], *words: str) -> float:
    return sum(value for name, value in found.items() if all(word in name for word in words))


@pytest.mark.parametrize("kind", list(BODIES))
async def test_bug_053_a_client_that_leaves_ends_its_request(
    cluster: ServedCluster, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.access")
    before = cluster.num_generated("decode-0")
    with armed(cluster, "decode-0", "worker.step", "pause:0.02"):
        async with Leaver(cluster, BODIES[kind]):
            await until(lambda: cluster.num_generated("decode-0") >= before + 3)
        await cluster.until_idle()
        assert cluster.num_generated("decode-0") < before + 150, "it did not run on"
    await until(lambda: any(getattr(one, "status", 0) == 499 for one in caplog.records))
    [line] = [one for one in caplog.records if getattr(one, "status", 0) == 499]
    assert line.error == "cancelled"  # type: ignore[attr-defined]
    await cluster.works()


@pytest.mark.parametrize(
    ("worker", "point"),
    [("decode-0", "decode.admit"), ("prefill-0", "prefill.queued"), ("prefill-0", "prefill.computing")],
)
async def test_bug_070_a_plain_request_is_cancelled_wherever_it_is(
    cluster: ServedCluster, worker: str, point: str
) -> None:
    before = matching(await metrics(cluster), "gateway_requests_total", "cancelled")
    with armed(cluster, worker, point, "pause:60") as failpoints:
        hits = failpoints.num_hits(point)
        async with Leaver(cluster, text(**LONG)):
            await until(lambda: failpoints.num_hits(point) > hits)
    await cluster.until_idle()
    found = await metrics(cluster)
    assert matching(found, "gateway_requests_total", "cancelled") == before + 1, "counted once"
    assert matching(found, "requests_running") == matching(found, "requests_waiting") == 0
    await cluster.works()


async def test_bug_058_after_aborts_the_gauges_are_at_rest(cluster: ServedCluster) -> None:
    before = await metrics(cluster)
    with armed(cluster, "decode-0", "worker.step", "pause:0.02"):
        async with AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(Leaver(cluster, BODIES["streamed"]))
            decode = cluster.cluster.workers["decode-0"].context.engine
            await until(lambda: decode.counters().num_running == 8)
            busy = await metrics(cluster)
            assert matching(busy, "baton_requests_running", "decode") == 8
            assert matching(busy, "gateway_num_requests_running") == 8
        await cluster.until_idle()
    found = await metrics(cluster)
    for word in ("requests_running", "requests_waiting", "num_requests_running"):
        assert matching(found, word) == 0, word
    for kind in ("in_use", "leased", "custody", "reserved"):
        assert matching(found, "baton_kv_blocks", f'kind="{kind}"') == 0, kind
    aborted = ("gateway_requests_total", "cancelled")
    assert matching(found, *aborted) == matching(before, *aborted) + 8
    await cluster.works()


# -- names ------------------------------------------------------------------------------------------------------------


async def test_bug_056_two_requests_of_one_name_are_two(cluster: ServedCluster) -> None:
    """The caller's name is a label: answers are not mixed, and who leaves takes nobody along."""
    name = {"x-request-id": "same"}
    bodies = [text(prompt=[one] * 9, max_tokens=20, ignore_eos=True, request_id="same") for one in (11, 22)]
    alone = [(await cluster.good(TEXT, body))["choices"][0]["text"] for body in bodies]
    assert alone[0] != alone[1]
    before = cluster.num_generated("decode-0")
    with armed(cluster, "decode-0", "worker.step", "pause:0.02"):
        async with Leaver(cluster, {**bodies[0], "max_tokens": 150}):
            calls = [asyncio.create_task(cluster.post(TEXT, body, headers=name)) for body in bodies]
            await until(lambda: cluster.num_generated("decode-0") >= before + 6)
        answers = await asyncio.gather(*calls)
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2 and "same" not in ids


@pytest.mark.parametrize("name", ["x" * 10_000, "a\tb", "na\u00efve", "%0d%0aset-cookie: a=b", '"', "../../etc"])
async def test_bug_056_an_odd_name_does_no_harm(
    cluster: ServedCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.access")
    headers = {"x-request-id": name.encode("latin-1")}
    answer = await cluster.post(TEXT, text(max_tokens=1, request_id=name), headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers and name not in answer.headers["x-request-id"]
    assert all(len(str(one.__dict__.get("client_request_id"))) <= 128 for one in caplog.records)


# -- sampling ---------------------------------------------------------------------------------------------------------


async def test_bug_038_a_seed_holds_in_any_company(cluster: ServedCluster) -> None:
    seeded = text(prompt="Once", seed=7, temperature=1, max_tokens=30, ignore_eos=True, return_token_ids=True)
    unseeded = {**seeded, "seed": None}

    async def ids(body: dict[str, Any]) -> list[int]:
        found: list[int] = (await cluster.good(TEXT, body))["choices"][0]["token_ids"]
        return found

    alone = await ids(seeded)
    others: set[tuple[int, ...]] = set()
    for place in range(10):
        batch = [unseeded] * 5
        batch.insert(place % 6, seeded)
        answers = await asyncio.gather(*[ids(body) for body in batch])
        assert answers.pop(place % 6) == alone
        others |= {tuple(one) for one in answers}
    assert len(others) == 50, "without a seed every answer is drawn anew"


async def test_bug_038_choices_of_a_seeded_request_differ_and_repeat(cluster: ServedCluster) -> None:
    body = text(seed=7, temperature=1, max_tokens=20, ignore_eos=True, n=3, return_token_ids=True)
    first, second = [[choice["token_ids"] for choice in (await cluster.good(TEXT, body))["choices"]] for _ in range(2)]
    assert first == second
    assert len({tuple(one) for one in first}) == 3


# -- structured output ------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BAD_SCHEMAS: list[Any] = [
    {"$ref": "#/$defs/missing"},
    {"$ref": "#"},
    {"pattern": "("},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
]
TREE = {
    "$defs": {
        "t": {"type": "object", "properties": {"v": {"enum": [1]}, "l": {"$ref": "#/$defs/t"}}, "required": ["v"]}
    },
    "$ref": "#/$defs/t",
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
async def test_bug_049_what_only_the_compiler_sees_is_refused_at_once(
    cluster: ServedCluster, schema: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = await cluster.refused(CHAT, chat(response_format=schema_format(schema), stream=stream))
    assert error["param"].split(".")[0] == "response_format"
    await cluster.works()
    assert all(line.message != "worker blamed" for line in caplog.records), "a caller's mistake is no worker's"


async def test_bug_049_a_schema_that_speaks_of_itself_works(cluster: ServedCluster) -> None:
    answer = await cluster.good(CHAT, chat(response_format=schema_format(TREE), max_tokens=150))
    choice = answer["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), TREE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(loaded_engines: dict[str, Engine]) -> AsyncIterator[ServedCluster]:
    async with served_cluster(loaded_engines) as it:
        yield it


@pytest.mark.parametrize(
    ("form", "schema"),
    [(schema_format(PERSON), PERSON), (schema_format({}), None), ({"type": "json_object"}, {"type": "object"})],
    ids=["person", "anything", "object"],
)
async def test_bug_050_structured_output_does_not_run_in_blanks(
    real: ServedCluster, form: dict[str, Any], schema: Any
) -> None:
    messages = [{"role": "user", "content": "Give a person"}]
    answer = await real.good(CHAT, chat(messages=messages, response_format=form, max_tokens=100))
    [choice] = answer["choices"]
    content = choice["message"]["content"]
    assert "\n" not in content and "  " not in json.dumps(content).replace("\\", ""), "white space has no place"
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(content), schema or {})
    else:
        assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 100)
        assert schema is not PERSON, "a bounded schema comes to its end"
