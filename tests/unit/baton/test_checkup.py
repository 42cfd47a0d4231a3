"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.checkup import Finding, Verdict, check_all, check_clock, check_gpu, check_models, judge_pair, render
from core.config import load_config
from core.handoff import LinkMeasure, PairCheck, TransferMode
from core.ids import WorkerId

LINK = LinkMeasure(
    backend="nixl",
    mode=TransferMode.READ,
    lane="cma",
    is_used=True,
    connect_s=0.01,
    latency_s=1e-5,
    bytes_per_s=4e9,
    memcpy_bytes_per_s=8e9,
)


def pair(*links: LinkMeasure, circuit: str = "closed") -> PairCheck:
    return PairCheck(
        prefill=WorkerId("p"), decode=WorkerId("d"), circuit=circuit, circuit_why="it broke", reason="why", links=links
    )


@pytest.mark.parametrize(
    ("check", "declared", "verdict"),
    [
        (pair(LINK), 0.0, Verdict.OK),
        (pair(LINK), 3.9, Verdict.OK),
        (pair(LINK), 40.0, Verdict.FAIL),
        (pair(LINK, circuit="open"), 0.0, Verdict.WARN),
        (pair(), 0.0, Verdict.FAIL),
    ],
)
def test_a_pair_is_judged_by_what_was_declared(check: PairCheck, declared: float, verdict: Verdict) -> None:
    found = judge_pair("pair p > d", check, declared)
    assert found.verdict is verdict and bool(found.remedy) is (verdict is not Verdict.OK)


def test_a_gpu_that_is_asked_for_and_not_there_is_said(tmp_path: Path) -> None:
    asking = load_config(overrides=["models.0.pools.decode.resources.num_gpus=1"], environ={})
    assert check_gpu(asking, tmp_path).verdict is Verdict.FAIL
    assert check_gpu(load_config(environ={}), tmp_path).verdict is Verdict.OK
    (tmp_path / "nvidia0").touch()
    assert check_gpu(asking, tmp_path) == Finding(subject="GPU", verdict=Verdict.OK, message="nvidia0")


def test_files_of_a_model_that_are_not_there_are_said(tmp_path: Path) -> None:
    config = load_config(overrides=[f"models.0.path={tmp_path}"], environ={})
    (found,) = check_models(config)
    assert found.verdict is Verdict.FAIL and found.remedy


def test_the_clock_is_looked_at() -> None:
    assert check_clock().subject == "clock" and check_clock().verdict is not Verdict.FAIL


async def test_without_a_cluster_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held, socket.create_server(("127.0.0.1", 0)) as other:
        address, free = (f"127.0.0.1:{one.getsockname()[1]}" for one in (held, other))
        other.close()
        config = load_config(
            overrides=[f"gateway.listen={address}", f"router.listen={free}", "transfer.backend=tcp"], environ={}
        )
        assert await check_all(config, free, as_json=False) == 1
    text = capsys.readouterr().out
    assert "no router answers there; the port is free" in text and "cannot listen" in text
    assert f"- gateway {address}: end the program that holds it" in text


def test_what_is_good_has_nothing_to_do() -> None:
    text = render([Finding(subject="a", verdict=Verdict.OK, message="b", remedy="c")])
    assert "what to do" not in text
