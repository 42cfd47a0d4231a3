"""What ``baton explain`` tells of a request: the choice, its prediction beside what happened, every attempt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.explain import explain, plain_id, render, to_json
from core.config import parse_config
from core.errors import ConfigError
from core.ids import GatewayId, HandoffId, Incarnation, PlacementId, RequestId, WorkerId
from core.reasons import REASONS
from core.types import AttemptRecord, GatewayReport, Mode, Placement, Prediction, RequestRecord, WorkerAddress
from router.policy import Reason
from router.service import RouterServer
from rpc.clients import RouterClient


def address(name: str) -> WorkerAddress:
    return WorkerAddress(worker_id=WorkerId(name), incarnation=Incarnation(2**62 + 1), address=f"{name}:1")


PLACEMENT = Placement(
    placement_id=PlacementId("p"),
    handoff_id=HandoffId("h"),
    mode=Mode.SPLIT,
    prefill=address("prefill-1"),
    decode=address("decode-0"),
    prediction=Prediction(
        prefill_wait_s=0.08,
        prefill_s=0.21,
        transfer_s=0.012,
        ttft_s=0.29,
        num_cached_tokens=512,
        num_kept_tokens=96,
        cost_s=0.5,
    ),
    runner_up="local:decode-0",
    runner_up_prediction=Prediction(ttft_s=0.91, cost_s=1.25),
    reason="cached_prefix",
)
ATTEMPT = AttemptRecord(attempt=1, started_s=0.0, duration_s=1.9, num_choices=1, outcome="ok", placement=PLACEMENT)
RECORD = RequestRecord(
    request_id=RequestId("abc"),
    model="smollm2",
    outcome="stop",
    num_prompt_tokens=812,
    num_completion_tokens=128,
    num_cached_tokens=496,
    attempts=1,
    mode="split",
    prefill_worker="prefill-1",
    decode_worker="decode-0",
    reason="cached_prefix",
    stages=(
        ("tokenize", 0.002),
        ("route", 0.001),
        ("prefill_queue", 0.095),
        ("prefill", 0.2),
        ("network", 0.003),
        ("transfer", 0.0204),
        ("decode", 1.51),
    ),
    ttft_s=0.301,
    duration_s=1.83,
    transfer_bytes=3 << 20,
    transfer_backend="nixl",
    history=(ATTEMPT,),
)


def test_predictions_stand_beside_what_happened() -> None:
    assert (
        render([RECORD])
        == """\
request abc  model smollm2  ended: stop
812 prompt tokens, 128 answer tokens in 1.83 s; first token after 301.0 ms

placed on   split:prefill-1>decode-0  cost 500.0 ms
because     cached_prefix: it holds the beginning of the prompt
instead of  local:decode-0  cost 1.25 s  (first token 910.0 ms, 0 tokens cached)

STAGE           PREDICTED          ACTUAL
tokenize        -                  2.0 ms
route           -                  1.0 ms
prefill_queue   80.0 ms            95.0 ms
prefill         210.0 ms           200.0 ms
network         -                  3.0 ms
transfer        12.0 ms            20.4 ms
decode          -                  1.51 s
to first token  290.0 ms           301.0 ms
cached tokens   512                496
moved           all but 96 tokens  3.0 MiB by nixl"""
    )


def test_every_attempt_is_there_and_says_why_it_ended() -> None:
    lost = replace(ATTEMPT, duration_s=0.4, outcome="worker_lost", message="decode-0: the stream broke")
    unplaced = AttemptRecord(
        attempt=3, started_s=0.5, duration_s=2.0, num_choices=1, outcome="no_worker", message="no ready decode worker"
    )
    text = render([replace(RECORD, attempts=3, outcome="no_worker", ttft_s=0.0, history=(lost, unplaced))])
    assert "worker_lost: decode-0: the stream broke" in text
    assert "3        500.0 ms  2.00 s    not placed" in text and "no_worker: no ready decode worker" in text
    assert "no token came" in text and "(1 more before these)" in text
    assert len(text.splitlines()) < 30 and max(map(len, text.splitlines())) <= 200


def test_a_request_that_was_never_placed_is_explained_too() -> None:
    unplaced = AttemptRecord(attempt=1, started_s=0, duration_s=2, num_choices=1, outcome="no_worker", message="none")
    text = render(
        [replace(RECORD, mode="", reason="", outcome="no_worker", stages=(("lost", 2.0),), history=(unplaced,))]
    )
    assert "placed on" not in text and "no_worker: none" in text
    assert render([replace(RECORD, history=())])


def test_a_reason_that_a_newer_router_gives_is_shown_as_it_is() -> None:
    newer = replace(ATTEMPT, placement=replace(PLACEMENT, reason="by_the_moon"))
    assert "because     by_the_moon\n" in render([replace(RECORD, history=(newer,))])


def test_every_reason_has_words() -> None:
    assert REASONS.keys() == set(Reason)


def test_the_machine_readable_form_is_json_without_lost_digits() -> None:
    told = json.loads(json.dumps(to_json(RECORD)))
    assert told["stages"]["prefill_queue"] == 0.095
    placement = told["history"][0]["placement"]
    assert placement["path"] == "split:prefill-1>decode-0"
    assert placement["decode"]["incarnation"] == "4000000000000001"
    assert placement["prediction"]["num_cached_tokens"] == 512 and "ticket" not in placement


@pytest.mark.parametrize("given", ["abc", "chatcmpl-abc", "cmpl-abc", "resp_abc", " abc\n"])
def test_the_id_of_an_answer_does_as_well(given: str) -> None:
    assert plain_id(given) == "abc"


# -- with a router ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def router(*records: RequestRecord) -> AsyncIterator[str]:
    config = parse_config(
        {"models": [{"name": "m", "path": "x"}], "router": {"listen": "127.0.0.1:0", "max_records": 9}}
    )
    server = RouterServer(config)
    await server.start()
    try:
        report = GatewayReport(
            gateway_id=GatewayId("g"),
            incarnation=Incarnation(7),
            http_address="",
            pid=1,
            num_requests=0,
            records=records,
        )
        async with RouterClient(server.address) as client:
            await client.report_gateway(report)
        yield server.address
    finally:
        await server.stop(0)


async def test_a_record_crosses_the_wire_whole(capsys: pytest.CaptureFixture[str]) -> None:
    further = replace(RECORD, request_id=RequestId("abc-1"))
    async with router(RECORD, further) as address:
        assert await explain(address, "chatcmpl-abc", as_json=False) == 0
        text = capsys.readouterr().out
        assert text.startswith(render([RECORD])) and text.rstrip().endswith("abc-1")
        assert await explain(address, "abc", as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
    assert all(one.pop("age_s") > 0 for one in told), "the ring says how long ago they ended"
    expected = json.loads(json.dumps([to_json(RECORD), to_json(further)]))
    assert told == [{name: value for name, value in one.items() if name != "age_s"} for one in expected]


async def test_an_unknown_id_is_told_how_far_back_the_records_reach() -> None:
    async with router() as address:
        with pytest.raises(ConfigError, match="has none at all yet"):
            await explain(address, "nobody", as_json=False)
    async with router(RECORD) as address:
        with pytest.raises(ConfigError, match=r"its 1 records \(at most 9\) reach back \d s"):
            await explain(address, "nobody", as_json=False)


async def test_no_router_is_said_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="no router answers"):
        await explain("127.0.0.1:9", "abc", as_json=False)
