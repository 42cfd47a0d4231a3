"""The words that launchers and components share."""

from __future__ import annotations

import pytest

from deploy.launcher import (
    ComponentEvent,
    ComponentKind,
    ComponentResources,
    ComponentSpec,
    ComponentState,
    RestartPolicy,
    parse_ready_line,
    ready_line,
)


def test_pauses_between_restarts_double_up_to_the_limit() -> None:
    policy = RestartPolicy(initial_s=0.5, max_s=3)
    assert [policy.delay_s(failures) for failures in (1, 2, 3, 4, 400)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_spec_survives_the_way_to_another_process() -> None:
    spec = ComponentSpec(
        name="decode-0",
        kind=ComponentKind.WORKER,
        argv=("python", "-m", "x"),
        env={"A": "1"},
        resources=ComponentResources(num_cpus=1.5, custom={"pool": 1}),
        restart=RestartPolicy(max_s=7),
    )
    assert ComponentSpec.from_json(spec.to_json()) == spec


def test_an_event_survives_the_way_back() -> None:
    event = ComponentEvent(
        component="router", state=ComponentState.EXITED, pid=7, exit_code=1, message="why", tail=("a", "b")
    )
    assert ComponentEvent.from_json(event.to_json()) == event


def test_a_ready_line_names_the_addresses() -> None:
    addresses = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}
    assert parse_ready_line(ready_line(addresses)) == addresses


@pytest.mark.parametrize("line", ["", "ready", "baton-ready", "baton-ready {", "baton-ready [1]", " baton-ready {}"])
def test_other_lines_are_no_ready_lines(line: str) -> None:
    assert parse_ready_line(line) is None


def test_only_demands_become_a_bundle() -> None:
    assert ComponentResources().as_bundle() == {}
    assert ComponentResources(num_cpus=2, custom={"pool": 1, "none": 0}).as_bundle() == {"CPU": 2, "pool": 1}
