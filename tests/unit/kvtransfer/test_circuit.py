"""A pair's circuit over every order of failures, successes and probes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.circuit import MAX_OPEN_S, Circuit, CircuitSettings, CircuitState

SETTINGS = CircuitSettings(num_failures=3, open_s=2.0)


def failing(circuit: Circuit, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        circuit.fail(circuit.begin(), "no answer", now)


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    circuit = Circuit(SETTINGS)
    failing(circuit, 2)
    circuit.succeed()
    failing(circuit, 2)
    assert circuit.state is CircuitState.CLOSED
    failing(circuit, 1, now=5.0)
    assert circuit.state is CircuitState.OPEN and circuit.retry_at == 7.0 and circuit.why == "no answer"


def test_one_incident_is_one_failure_however_many_hand_offs_it_hits() -> None:
    circuit = Circuit(SETTINGS)
    under_way = [circuit.begin() for _ in range(20)]
    assert not any(circuit.fail(begun, "the stream broke", 0.0) for begun in under_way)
    assert circuit.state is CircuitState.CLOSED


def test_a_canary_closes_it_on_probation_and_the_next_failure_opens_it_for_longer() -> None:
    circuit = Circuit(SETTINGS)
    failing(circuit, 3)
    circuit.begin_probe()
    circuit.end_probe("", 2.0)
    assert circuit.state is CircuitState.CLOSED
    failing(circuit, 1, now=3.0)
    assert circuit.state is CircuitState.OPEN and circuit.retry_at == 7.0
    circuit.begin_probe()
    circuit.end_probe("", 7.0)
    circuit.succeed()
    failing(circuit, 2)
    assert circuit.state is CircuitState.CLOSED, "a good hand-off ends the probation"


def test_a_probe_that_fails_waits_longer_up_to_a_limit() -> None:
    circuit, now, waits = Circuit(SETTINGS), 0.0, []
    failing(circuit, 3)
    for _ in range(8):
        now = circuit.retry_at
        circuit.begin_probe()
        circuit.end_probe("wrong canary", now)
        waits.append(circuit.retry_at - now)
    assert waits[:3] == [4.0, 8.0, 16.0] and waits[-1] == MAX_OPEN_S


def test_a_hand_off_under_way_that_turns_out_good_closes_it_whatever_the_probe_says_then() -> None:
    circuit = Circuit(SETTINGS)
    failing(circuit, 3)
    circuit.begin_probe()
    circuit.succeed()
    circuit.end_probe("too late", 9.0)
    assert circuit.state is CircuitState.CLOSED


@given(st.lists(st.sampled_from(["fail", "late", "good", "tick", "probed", "probe fails"])))
def test_an_open_circuit_always_has_a_way_back(events: list[str]) -> None:
    circuit, now, early = Circuit(SETTINGS), 0.0, 0
    for event in events:
        now += 1.0
        if event in ("fail", "late"):
            circuit.fail(circuit.begin() if event == "fail" else early, "failed", now)
        elif event == "good":
            circuit.succeed()
        elif event == "tick" and circuit.state is CircuitState.OPEN and now >= circuit.retry_at:
            circuit.begin_probe()
        elif event.startswith("probe"):
            circuit.end_probe("" if event == "probed" else "failed", now)
        if circuit.state is CircuitState.OPEN:
            assert circuit.retry_at <= now + MAX_OPEN_S
    if circuit.state is CircuitState.OPEN:
        circuit.begin_probe()
    circuit.end_probe("", now)
    assert circuit.state is CircuitState.CLOSED
