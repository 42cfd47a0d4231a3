"""The short way of plain tokens: the same bytes as the long one, taken by nearly all, and closed when it must be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from core import types as t
from core.clock import ManualClock
from gateway.answers import Answer
from gateway.lane import Lane
from gateway.stages import StageClock
from tests.support.scripted import Script
from tests.support.site import cluster_config, open_site, serve
from tests.support.tiny_tokenizer import byte_ids, ids_of, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALPHABET = [*'hello wor\n"\\\t/\x7f<|', "é", "日", "🙂"]


def texts(number: int) -> list[str]:
    draw = random.Random(11)
    return ["".join(draw.choices(ALPHABET, k=30)) for _ in range(number)]


def tokens_of(text: str) -> list[int]:
    """Whole words where the vocabulary has them, bytes of characters elsewhere, and what no vocabulary has."""
    return [*tiny_tokenizer().encode(text, parse_special=False), 0, 1_000_000, *ids_of("end")]


def body(route: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": "x"} if route == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    return {"model": "m", "stream": True, "max_tokens": 120, "ignore_eos": True, **asked, **more}


async def over_a_socket(script: Script, route: str, asked: dict[str, Any], *, has_text: bool = True) -> bytes:
    """The body of the answer, its chunks joined. The third token waits until the client has text, or where the first
    ones have none until the gateway has taken them."""
    async with open_site(script) as site, serve(site.gateway, cluster_config().gateway) as address:
        site.cluster.hold("token-2")
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(asked).encode()
        head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        async with asyncio.timeout(20):
            received = b""
            if has_text:
                received = await reader.readuntil(b'"logprobs":null,"finish_reason":null}]')
            else:
                await site.cluster.until("token-2")
                for _ in range(100):
                    await asyncio.sleep(0)
            site.cluster.release("token-2")
            received += await reader.read()
        assert received.startswith(b"HTTP/1.1 200 "), received[:100]
        received = received.partition(b"\r\n\r\n")[2]
        writer.close()
    joined = b""
    while received:
        size, _, received = received.partition(b"\r\n")
        joined += received[: int(size, 16)]
        assert received[int(size, 16) :][:2] == b"\r\n"
        received = received[int(size, 16) + 2 :]
    return joined


def shown(content: bytes) -> tuple[Any, list[str]]:
    """What does not depend on how many deltas were joined: the last event without text, and each choice's text."""
    events = [json.loads(line[6:]) for line in content.decode().split("\n\n") if line and not line.endswith("[DONE]")]
    text = ["", ""]
    for event in events:
        assert event.pop("id") and event.pop("created")
        for choice in event["choices"]:
            text[choice["index"]] += choice.pop("text", "") + choice.get("delta", {}).pop("content", "")
    return events[-1], text


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}], ids=["one", "n", "usage"])
async def test_both_ways_lead_to_the_same_answer(route: str, more: dict[str, Any]) -> None:
    for text in texts(3):
        steps = [[one] for one in tokens_of(text)]
        async with open_site(Script(steps=steps, mode=t.Mode.LOCAL)) as site:
            long = (await site.client.post(route, body(route, **more))).body
        short = await over_a_socket(Script(steps=steps, mode=t.Mode.LOCAL), route, body(route, **more))
        assert shown(short) == shown(long)
        assert shown(short)[1][0].endswith("end")
        events = [sorted(json.loads(line[6:])) for line in short.decode().split("\n\n")[:-2]]
        assert all(one == events[0] for one in events), "chunks of both ways have the same members"


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_an_answer_that_begins_without_text_begins_with_its_head(route: str) -> None:
    """The head waits for the first body; a lane that was open by then would write before it."""
    steps = [[one] for one in (0, 0, *ids_of("hello"))]
    content = await over_a_socket(Script(steps=steps, mode=t.Mode.LOCAL), route, body(route), has_text=False)
    assert shown(content)[1][0] == "hello"


async def test_most_tokens_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    num_long = 0
    make = Answer._text_chunk

    def counted(*arguments: Any) -> bytes:
        nonlocal num_long
        num_long += 1
        return make(*arguments)

    monkeypatch.setattr(Answer, "_text_chunk", counted)
    script = Script(steps=[[one] for one in ids_of("a" * 40 + "é" + "b" * 40)], mode=t.Mode.LOCAL)
    content = await over_a_socket(script, CHAT, body(CHAT))
    assert content.count(b'"content":"a"') > 30
    assert num_long < 8, "the first ones, the character of two tokens, the last one"


async def test_a_stop_string_or_asked_ids_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a lane was opened")

    monkeypatch.setattr(Lane, "open_client", refuse)
    steps = [[one] for one in ids_of("hello")]
    for more in ({"stop": ["zz"]}, {"return_token_ids": True}):
        content = await over_a_socket(Script(steps=steps, mode=t.Mode.LOCAL), CHAT, body(CHAT, **more))
        assert shown(content)[1][0] == "hello"


class Rig:
    """A lane between a list of what was written and a list of what went the long way."""

    begins = tuple(b"%d " % size for size in range(20))
    end = b"!"

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.slow: list[tuple[int, int]] = []
        self.raw: Callable[[bytes], None] = self.written.append
        self.on_blocked: Callable[[], None] = lambda: None
        self.is_ready = True
        self.stages = StageClock(ManualClock(5.0))
        self.lane = Lane(tiny_tokenizer().json_texts)
        self.lane.join([], self.stages)
        self.lane.slow = lambda index, token_id, now: self.slow.append((index, token_id))

    def whole_body(self) -> bytes | None:
        raise AssertionError

    def watch(self, on_gone: Callable[[], None]) -> None:
        raise AssertionError

    def write(self, piece: bytes) -> None:
        raise AssertionError

    def abort(self) -> None:
        raise AssertionError

    def open(self) -> None:
        self.lane.head, self.lane.tail = b"<", b">"
        self.lane.open_text()
        self.lane.open_client(self)


A, QUOTE = byte_ids()[ord("a")], byte_ids()[ord('"')]


def test_an_open_lane_writes_and_accepts() -> None:
    rig = Rig()
    rig.open()
    rig.lane.take(0, A, 6.0)
    rig.lane.take(1, QUOTE, 7.0)
    assert rig.written == [b"3 <a>!", b'4 <\\">!']
    assert rig.lane.accepted == [A, QUOTE]
    assert (rig.stages.touched, rig.slow) == (7.0, [])


@pytest.mark.parametrize("index", [0, 2])
def test_a_token_out_of_turn_goes_the_long_way(index: int) -> None:
    rig = Rig()
    rig.open()
    rig.lane.take(0, A, 6.0)
    rig.lane.take(index, A, 6.0)
    assert (len(rig.written), rig.slow) == (1, [(index, A)])


@pytest.mark.parametrize("token_id", [byte_ids()[0xE6], 0, 1_000_000], ids=["part of a character", "special", "none"])
def test_a_token_without_a_text_of_its_own_goes_the_long_way(token_id: int) -> None:
    rig = Rig()
    rig.open()
    rig.lane.take(0, token_id, 6.0)
    assert (rig.written, rig.lane.accepted, rig.slow) == ([], [], [(0, token_id)])


@pytest.mark.parametrize("end", ["close_text", "close_client"])
def test_a_lane_closed_at_either_end_is_closed(end: str) -> None:
    rig = Rig()
    rig.open()
    getattr(rig.lane, end)()
    rig.lane.take(0, A, 6.0)
    assert (rig.written, rig.lane.accepted, rig.slow) == ([], [], [(0, A)])


def test_before_the_first_chunk_there_is_nothing_to_open() -> None:
    rig = Rig()
    rig.lane.open_text()
    rig.lane.open_client(rig)
    rig.lane.take(0, A, 6.0)
    assert (rig.written, rig.slow) == ([], [(0, A)])


def test_a_connection_that_is_being_closed_harms_nobody_else() -> None:
    rig = Rig()

    def fail(piece: bytes) -> None:
        raise RuntimeError("closed")

    rig.raw = fail
    rig.open()
    rig.lane.take(0, A, 6.0)
    rig.lane.take(0, A, 6.0)
    assert (rig.lane.accepted, rig.slow) == ([], [(0, A), (0, A)])


def test_json_texts_are_what_the_encoder_writes() -> None:
    tokenizer = tiny_tokenizer()
    for token_id, text in enumerate(tokenizer.json_texts):
        if text is not None:
            assert json.loads(b'"' + text + b'"') == tokenizer.decode([token_id], skip_special_tokens=True)
    assert tokenizer.json_texts[byte_ids()[0xE6]] is None
    assert tokenizer.json_texts[0] is None, "special"
