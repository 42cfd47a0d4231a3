"""Failpoints: off by default, exact when armed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import failpoints
from core.errors import ConfigError, DigestMismatch, PeerLost
from core.failpoints import Failpoints


def test_without_an_action_nothing_happens() -> None:
    failpoints = Failpoints()
    failpoints.hit("anything")
    assert failpoints.num_hits("anything") == 0


def test_an_error_is_the_typed_one() -> None:
    with pytest.raises(DigestMismatch, match="failpoint here"):
        Failpoints({"here": "error:digest_mismatch"}).hit("here")


def test_once_and_after_count_hits() -> None:
    failpoints = Failpoints({"a": "once:error:peer_lost", "b": "after:2:error:peer_lost"})
    outcomes = {"a": [], "b": []}  # type: dict[str, list[bool]]
    for name in outcomes:
        for _ in range(4):
            try:
                failpoints.hit(name)
                outcomes[name].append(True)
            except Exception as error:
                assert "failpoint" in str(error)
                outcomes[name].append(False)
    assert outcomes == {"a": [False, True, True, True], "b": [True, True, False, False]}


def test_when_acts_once_for_each_arming_and_survives_restarts(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    for _ in range(2):  # each round stands for a start of the process
        failpoints = Failpoints({"a": f"when:{armed}:error:peer_lost"})
        failpoints.hit("a")
        armed.touch()
        with pytest.raises(PeerLost):
            failpoints.hit("a")
        failpoints.hit("a")


async def test_hold_tells_who_is_there_and_lasts_until_it_is_let_go(tmp_path: Path) -> None:
    armed, held = tmp_path / "armed", tmp_path / "held"
    failpoints = Failpoints({"a": f"when:{armed}:hold:{held}"})
    armed.touch()
    task = asyncio.create_task(failpoints.reach("a", "request-7"))
    await asyncio.sleep(0)
    assert held.read_text() == "a request-7\n" and not task.done()
    await failpoints.reach("a", "request-8")  # it holds the one who came when it was armed
    held.unlink()
    await task


async def test_a_pause_lets_the_loop_run() -> None:
    failpoints = Failpoints({"slow": "pause:30"})
    task = asyncio.create_task(failpoints.reach("slow"))
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


def test_a_pause_that_ends_while_it_is_looked_at_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the clock passes the end between two looks at it: there is no sleeping backwards."""
    clock = iter([0.0, *[0.5, 1.5] * 10])
    slept: list[float] = []
    monkeypatch.setattr(failpoints, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=slept.append))
    Failpoints({"a": "pause:1"}).hit("a")
    assert slept and min(slept) >= 0


def test_an_unknown_action_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown action 'explode'"):
        Failpoints({"x": "explode"}).hit("x")
