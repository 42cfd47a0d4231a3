"""What `baton bench` reads and tells: events of a stream, latencies by their definitions, tables, the knee."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.client.figures import Figures, Objective, Spread, figures, parse_seconds
from bench.client.html import html_report
from bench.client.http import Address
from bench.client.knee import find_knee
from bench.client.player import Run
from bench.client.record import AnswerReader, Record
from bench.client.svg import Series, plot
from bench.client.tables import as_json, markdown
from core.errors import ConfigError


def record(*times: float, tokens: int, sent_at: float = 0.0, error: str = "") -> Record:
    return Record(
        sent_at=sent_at,
        due_at=sent_at,
        times=list(times),
        num_prompt_tokens=10,
        num_completion_tokens=tokens,
        error=error,
    )


def run_of(*records: Record, duration_s: float = 10.0) -> Run:
    return Run(records=list(records), ended_at=duration_s, num_sent=len(records), max_running=2)


def test_latencies_are_as_they_are_defined() -> None:
    one = record(1.0, 1.5, 3.0, tokens=5)
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.itl_s) == (1.0, 3.0, 0.5, [0.5, 1.5])
    assert record(1.0, tokens=1).tpot_s is None, "one token has no time between tokens"
    found = figures(run_of(one, record(2.0, tokens=1), record(tokens=0, error="queue_full")), Objective(ttft_s=1.5))
    assert found.ttft.median == 1.5 and found.tpot.number == 1 and found.itl.number == 2
    assert (found.num_ok, found.errors, found.num_completion_tokens) == (2, {"queue_full": 1}, 6)
    assert found.goodput == 0.1 and found.attainment == pytest.approx(1 / 3), "failures are not attained"
    assert found.request_rate == 0.2 and found.output_rate == pytest.approx(0.6) and found.tokens_per_event == 1.5


def test_percentiles_are_linear_between_values() -> None:
    spread = Spread.of([float(each) for each in range(101)])
    assert (spread.mean, spread.median, spread.percentiles[95], spread.percentiles[99]) == (50.0, 50.0, 95.0, 99.0)
    assert math.isnan(Spread.of([]).mean)


def test_objectives_are_read_in_seconds_and_milliseconds() -> None:
    objective = Objective.parse(["ttft=0.5,tpot=50ms", "e2e=2s"])
    assert objective == Objective(ttft_s=0.5, tpot_s=0.05, e2e_s=2.0) and objective.is_any
    assert str(objective) == "TTFT <= 500 ms, TPOT <= 50 ms, E2E <= 2000 ms"
    assert not Objective().is_any and parse_seconds("20ms") == 0.02
    assert Objective(itl_s=1.0).is_met(record(1.0, 1.9, tokens=2))
    assert not Objective(itl_s=0.5).is_met(record(1.0, 1.9, tokens=2))
    for text in ("ttft", "speed=1", "ttft=-1", "ttft=fast", "ttft=0", "ttft=nan"):
        with pytest.raises(ConfigError):
            Objective.parse([text])


EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n'
    b'data:{"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 7, len(EVENTS)])
def test_a_stream_reads_the_same_wherever_its_bytes_are_cut(size: int) -> None:
    read = Record()
    reader = AnswerReader(read)
    for begin in range(0, len(EVENTS), size):
        reader.feed(EVENTS[begin : begin + size], float(begin))
    reader.end(200)
    assert read.is_ok and len(read.times) == 2, "an empty part and a comment are no parts of the answer"
    assert (read.text, read.finish_reason, read.num_prompt_tokens) == ("ab", "length", 7)
    assert (read.num_completion_tokens, read.num_cached_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"error": {"code": "queue_full", "message": "later"}}', 503, "queue_full"),
        (b'{"error": {"message": "no such model", "type": "NotFound", "code": null}}', 404, "NotFound"),
        (b"<html>", 502, "http 502"),
        (b'{"detail": "nothing"}', 404, "http 404"),
        (b'data: {"error": {"code": "worker_lost"}}\n\n', 200, "worker_lost"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', 200, "truncated: the stream ended without a finish reason"),
        (b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', 200, "empty: no part of an answer came"),
        (b"data: {nothing\n\n", 200, "malformed event: b'{nothing'"),
        (b'data: {"choices": 3}\n\n', 200, "malformed event: b'{\"choices\": 3}'"),
    ],
)
def test_what_went_wrong_has_a_name(body: bytes, status: int, error: str) -> None:
    read = Record()
    reader = AnswerReader(read)
    reader.feed(body, 1.0)
    reader.end(status)
    assert read.error == error


def test_tables_and_reports_have_every_figure_and_its_definition() -> None:
    run = run_of(record(1.0, 1.5, 3.0, tokens=5), record(tokens=0, error="<queue_full>"))
    found = figures(run, Objective(ttft_s=2.0))
    facts = {"model": "m & n", "server": "http://x"}
    table = markdown(facts, found, sweep=[(2.0, found)])
    for text in ("| TPOT (ms) | 500.0 |", "1 <queue_full>", "1 of 2", "| 2 | 50.0% |", "- ITL: each gap", "goodput"):
        assert text in table
    content = as_json(facts, found, run, sweep=[(2.0, found)])
    assert json.loads(json.dumps(content, allow_nan=False))["median_ttft_ms"] == 1000.0
    assert content["p99_e2el_ms"] == 3000.0 and content["ttfts"] == [1.0, None]
    page = html_report("bench of <m>", facts, found, run, sweep=[(1.0, found), (2.0, found)])
    assert "&lt;queue_full&gt;" in page and "<queue_full>" not in page and page.count("<svg") == 6
    assert "src=" not in page and "href=" not in page, "nothing is fetched from elsewhere"


def test_plots_are_drawings_whatever_is_in_them() -> None:
    series = [Series(name="a<b", points=[(1.0, 2.0), (math.inf, 1.0), (3.0, math.nan), (100.0, 4.0)])]
    for drawn in (plot("t", series, x_label="x", y_label="y", is_x_log=True), plot("t", [], x_label="x", y_label="y")):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")


async def knee_of(capacity: float, from_rate: float) -> tuple[float, int]:
    template = figures(run_of(record(1.0, 2.0, tokens=2)), Objective())

    async def probe(rate: float) -> Figures:
        return replace(template, num_requests=100, num_good=100 if rate <= capacity else 50)

    knee, tried = await find_knee(probe, from_rate=from_rate)
    return knee, len(tried)


@pytest.mark.parametrize("from_rate", [0.5, 3.0, 40.0])
async def test_the_knee_is_found_from_either_side(from_rate: float) -> None:
    knee, number = await knee_of(7.3, from_rate)
    assert 7.3 / 1.05 <= knee <= 7.3 and number <= 12


async def test_a_server_that_never_meets_its_objectives_has_no_knee() -> None:
    assert (await knee_of(0.0, 1.0))[0] == 0.0


def test_urls_are_read_with_and_without_their_parts() -> None:
    assert Address.of("localhost:80/v1/") == Address(host="localhost", port=80, is_tls=False, prefix="")
    assert Address.of("https://a.b/api/v1") == Address(host="a.b", port=443, is_tls=True, prefix="/api")
    for url in ("ftp://a", "http://", "http://a:b"):
        with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
            Address.of(url)
