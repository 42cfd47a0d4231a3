"""`baton bench` against servers: what it measures is what they did, and what is wrong is said."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from baton.cli import main
from bench.client.http import ConnectionLost, HttpClient

Handler = Callable[[bytes, dict[str, object], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def _length(head: bytes) -> int:
    names = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return next((int(value) for name, _, value in names if name == b"content-length"), 0)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Calls ``handler`` with path and body of each request, several on one connection."""

    connections: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = _length(head)
                body = json.loads(await reader.readexactly(length) or b"{}")
                await handler(head.split()[1], body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            connections.discard(task)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


@contextmanager
def server_beside(handler: Handler) -> Iterator[str]:
    """The same on a thread, for a command that has an event loop of its own."""
    ready, url, loop = threading.Event(), "", asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        nonlocal url
        async with serving(handler) as url:
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Speaker:
    """Answers with as many words as are asked for, `gap_s` apart."""

    def __init__(self, *, gap_s: float = 0.0) -> None:
        self.asked: list[dict[str, object]] = []
        self.gap_s = gap_s

    async def __call__(self, path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if path == b"/v1/models":
            content = b'{"data": [{"id": "spoken"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            return
        self.asked.append(body)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        number = body["max_tokens"]
        assert isinstance(number, int)
        for index in range(number):
            await asyncio.sleep(self.gap_s)
            reason = "length" if index + 1 == number else None
            delta = {"delta": {"content": "w"}} if path.endswith(b"/chat/completions") else {"text": "w"}
            writer.write(chunk(event({"choices": [{**delta, "finish_reason": reason}]})))
        usage = {"prompt_tokens": 11, "completion_tokens": number}
        writer.write(chunk(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def test_a_run_tells_what_the_server_did_and_writes_its_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = Speaker(gap_s=0.02)
    with server_beside(speaker) as url:
        code = main(
            ["bench", "--url", url, "--workload", "fixed", "--prompt-tokens", "11", "--answer-tokens", "6"]
            + ["--requests", "8", "--rate", "50", "--slo", "ttft=5", "--require-attainment", "1", "--warmup", "1"]
            + ["--json", str(tmp_path / "b.json"), "--html", str(tmp_path / "b.html")]
            + ["--markdown", str(tmp_path / "b.md")]
        )
    assert code == 0 and len(speaker.asked) == 9, "eight, and one to warm up"
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["model"] == "spoken" and found["completed"] == 8 and found["total_output_tokens"] == 48
    assert found["total_input_tokens"] == 88 and all(len(gaps) == 5 for gaps in found["itls"])
    assert found["median_tpot_ms"] >= 19 and found["median_ttft_ms"] >= 19, "sleeps are never shorter"
    assert all(body["prompt"].count(" ") == 11 for body in speaker.asked)  # type: ignore[attr-defined]
    assert (tmp_path / "b.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "b.html").read_text().startswith("<!doctype html>")


def test_chats_repeat_what_was_said_and_answered(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker()
    with server_beside(speaker) as url:
        arguments = ["--endpoint", "chat", "--workload", "chat", "--turns", "2", "--think", "0", "--requests", "3"]
        code = main(["bench", "--url", url, *arguments, "--answer-tokens", "4", "--concurrency", "1", "--warmup", "0"])
    assert code == 0 and len(speaker.asked) == 6
    first, second = (body["messages"] for body in speaker.asked[:2])
    assert isinstance(first, list) and isinstance(second, list)
    assert [each["role"] for each in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first and second[2]["content"] == "wwww"


def test_closed_loop_has_so_many_at_once(tmp_path: Path) -> None:
    with server_beside(Speaker(gap_s=0.005)) as url:
        arguments = ["--requests", "12", "--concurrency", "3", "--answer-tokens", "4", "--json", str(tmp_path / "b")]
        assert main(["bench", "--url", url, *arguments]) == 0
    assert json.loads((tmp_path / "b").read_text())["max_concurrent_requests"] == 3


def test_a_knee_is_searched_with_words_that_are_new_each_time(tmp_path: Path) -> None:
    speaker = Speaker()
    with server_beside(speaker) as url:
        arguments = [
            "--requests",
            "3",
            "--rate",
            "200",
            "--answer-tokens",
            "2",
            "--slo",
            "ttft=1ms",
        ]
        code = main(["bench", "--url", url, *arguments, "--knee", "--json", str(tmp_path / "b")])
    assert code == 0
    sweep = json.loads((tmp_path / "b").read_text())["sweep"]
    assert 1 < len(sweep) <= 12 and len({str(body["prompt"]) for body in speaker.asked}) == len(speaker.asked)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--knee"], "--knee needs objectives"),
        (["--slo", "speed=3"], "is no objective"),
        (["--prompt-tokens", "long"], "is no length"),
        (["--duration", "3"], "--duration needs --rate"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--trace", "/nowhere"], "cannot read the trace"),
        (["--endpoint", "chat", "--prompts", "ids"], "--endpoint completions"),
        (["--url", "ftp://x"], "no http or https URL"),
        (["--url", "http://127.0.0.1:1"], "is --url right"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_beside(Speaker()) as url:
        assert main(["bench", "--url", url, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_server_that_answers_nothing_is_a_failure_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        content = b'{"error": {"code": "queue_full"}}'
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))

    with server_beside(refuse) as url:
        assert main(["bench", "--url", url, "--model", "m", "--requests", "2", "--warmup", "0"]) == 1
    assert "2 queue_full" in capsys.readouterr().out


async def test_answers_without_a_length_end_with_their_connection() -> None:
    async def speak(path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    async with serving(speak) as url:
        client = HttpClient(url)
        assert await client.get("/x") == (200, b"all of it")
        assert await client.get("/x") == (200, b"all of it"), "a new connection"
        client.close()


async def test_a_connection_that_was_closed_while_it_was_idle_is_no_error() -> None:
    async def speak(path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if path != b"/again":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async with serving(speak) as url:
        client = HttpClient(url)
        assert [await client.get("/x") for _ in range(3)] == [(200, b"ok")] * 3
        with pytest.raises(ConnectionLost):
            await client.get("/again")
        client.close()


async def test_half_an_answer_is_an_error_and_not_an_answer() -> None:
    async def break_off(path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        writer.close()

    async with serving(break_off) as url:
        client = HttpClient(url)
        with pytest.raises(ConnectionLost):
            await client.get("/x")
        client.close()


async def test_an_event_costs_the_client_few_microseconds() -> None:
    """CPU time of this thread, the server's included. The bound of the client alone is 10 us; a busy machine is slower,
    so this one only keeps it from growing by a multiple."""
    number = 5000
    content = b"".join(
        chunk(event({"id": "c" * 30, "object": "text_completion", "created": 1, "model": "m",
                     "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]}))
        for _ in range(number)
    )  # fmt: skip

    async def flood(path: bytes, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + content + b"0\r\n\r\n")

    from bench.client.record import AnswerReader, Record

    async with serving(flood) as url:
        client, costs = HttpClient(url), []
        for _ in range(5):
            record = Record()
            started = time.thread_time()
            assert await client.post("/x", b"{}", AnswerReader(record).feed) == 200
            costs.append((time.thread_time() - started) / number)
            assert len(record.times) == number
        client.close()
    assert min(costs) < 30e-6, costs
