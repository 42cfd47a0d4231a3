"""What ``baton rollout`` asks for, and how it tells how far it is; and ``baton certs``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli import main
from baton.rollout import progress, render, section_of, to_json
from core.clock import ManualClock
from core.config import load_config
from core.errors import InvalidRequest
from core.security_config import Identity
from core.types import ClusterStatus, PoolStatus, Role, Rollout, WorkerState, WorkerStatus
from router.rollouts import RolloutBook
from tests.unit.router.builders import make_load, make_registration

M = "tiny"


def worker(name: str, role: Role, revision: str, state: WorkerState = WorkerState.READY) -> WorkerStatus:
    registration = replace(make_registration(name, 1, role), revision=revision)
    registration = replace(registration, model=replace(registration.model, name=M))
    return WorkerStatus(registration=registration, load=make_load(state), state=state, heartbeat_age_s=0.0)


def status(*workers: WorkerStatus, problem: str = "", revision: str = "two") -> ClusterStatus:
    pools = tuple(
        PoolStatus(
            model=M,
            role=role,
            desired=1,
            ready=sum(w.registration.role is role and w.state is WorkerState.READY for w in workers),
            problem=problem if role is Role.PREFILL else "",
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    return ClusterStatus(
        router_incarnation=1,  # type: ignore[arg-type]
        router_pid=1,
        router_http_address="",
        pools=pools,
        workers=workers,
        gateways=(),
        models=(),
        num_placements=0,
        num_waiting=0,
        rollouts=(Rollout(model=M, revision=revision, section="{}", age_s=3.0),),
    )


P, D = Role.PREFILL, Role.DECODE
OLD, NEW = (worker("p0", P, "one"), worker("d0", D, "one")), (worker("p1", P, "two"), worker("d1", D, "two"))


def test_it_is_over_when_all_that_is_there_is_new_and_serves() -> None:
    assert progress(status(*OLD), M, "two") == (
        False,
        "tiny two: prefill 0 of 1 new, 1 old, decode 0 of 1 new, 1 old",
    )
    leaving = worker("d0", D, "one", WorkerState.DRAINING)
    assert not progress(status(*NEW, leaving), M, "two")[0], "one still finishes"
    assert progress(status(*NEW), M, "two") == (True, "tiny two: prefill 1 of 1 new, decode 1 of 1 new")
    assert not progress(status(NEW[0], worker("d1", D, "two", WorkerState.STARTING)), M, "two")[0]


def test_what_keeps_it_is_told_and_another_one_ends_the_waiting() -> None:
    assert progress(status(*OLD, problem="p1: no such file"), M, "two")[1].endswith("; p1: no such file")
    assert progress(status(*OLD, revision="three"), M, "two") == (
        True,
        "tiny: revision three was asked for in the meantime",
    )


def test_it_is_shown_for_people_and_for_programs() -> None:
    (told,) = to_json(status(*NEW))
    assert told["revision"] == "two" and told["is_over"] and len(told["workers"]) == 2  # type: ignore[arg-type]
    assert "(over)" in render(status(*NEW)) and "p1" in render(status(*NEW))
    assert render(replace(status(), rollouts=())) == "no rollout was asked for since the cluster was started"


def test_a_revision_without_a_name_is_a_digest_of_what_the_section_says() -> None:
    one, same, other = (
        section_of(load_config(overrides=[f"models.0.kv.block_size={size}"], environ={}), "smollm2-135m-instruct", "")
        for size in (16, 16, 32)
    )
    assert one.revision == same.revision != other.revision and len(one.revision) == 8
    assert section_of(load_config(environ={}), "smollm2-135m-instruct", "mine").revision == "mine"


def test_the_router_keeps_the_last_word_of_each_model_also_over_its_restart() -> None:
    models = load_config(overrides=[f"models.0.name={M}"], environ={}).models
    clock = ManualClock(100.0)
    book = RolloutBook(clock, models)
    asked = Rollout(model=M, revision="two", section="{}", age_s=0.0)
    book.start(asked)
    clock.advance(5)
    (kept,) = book.rollouts()
    assert (kept.revision, kept.age_s) == ("two", 5.0)
    book.adopt([replace(asked, revision="one", age_s=50.0)])
    assert book.rollouts()[0].revision == "two", "older"
    fresh = RolloutBook(clock, models)
    fresh.adopt([kept, replace(kept, model="unknown")])
    assert fresh.rollouts() == (kept,)
    for wrong in (replace(asked, model="unknown"), replace(asked, revision="")):
        with pytest.raises(InvalidRequest):
            book.start(wrong)


def test_certificates_are_made_for_every_kind_of_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["certs", str(tmp_path / "tls"), "--set", "security.domain=prod.baton"]
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * (1 + len(Identity))
    assert main(command) == 0
    assert "none ends soon" in capsys.readouterr().out
