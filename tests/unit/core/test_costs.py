"""Cost tables: how long a step with so much work takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from core.config import ClusterConfig, config_to_json, load_config
from core.costs import HandoffCosts, StepCosts, StepWork, read_costs
from core.errors import ConfigError
from core.types import ExecutionKind

TABLE = StepCosts(
    prompt=((1, 0.010), (100, 0.109), (200, 0.309)),
    decode=((1, 0.010), (8, 0.017)),
    shared_s=0.009,
    prompt_pair_s=1e-6,
    decode_position_s=1e-5,
)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(), 0.0),
        (StepWork(num_prompt_tokens=100), 0.109),
        (StepWork(num_prompt_tokens=50), 0.059),  # between two rows
        (StepWork(num_prompt_tokens=300), 0.509),  # beyond the last
        (StepWork(num_prompt_tokens=100, num_prompt_pairs=5050), 0.109 + 0.00505),
        (StepWork(num_decode_rows=4, num_decode_positions=1000), 0.013 + 0.01),
        (StepWork(num_prompt_tokens=100, num_decode_rows=4), 0.109 + 0.013 - 0.009),  # the weights are read once
    ],
)
def test_a_step_takes_what_its_work_takes(work: StepWork, seconds: float) -> None:
    assert TABLE.step_s(work) == pytest.approx(seconds)


def test_below_its_first_row_a_table_is_flat_and_one_row_alone_is_a_rate() -> None:
    table = StepCosts(prompt=((16, 0.1),), decode=((4, 0.1), (8, 0.2)))
    assert table.step_s(StepWork(num_prompt_tokens=1)) == 0.1
    assert table.step_s(StepWork(num_prompt_tokens=32)) == pytest.approx(0.2)
    assert table.step_s(StepWork(num_decode_rows=2)) == 0.1


def test_a_mixed_step_takes_no_less_than_either_part() -> None:
    table = TABLE.model_copy(update={"shared_s": 10.0})
    assert table.step_s(StepWork(num_prompt_tokens=100, num_decode_rows=4)) == pytest.approx(0.109)


def test_more_work_never_takes_less() -> None:
    def at(tokens: int, rows: int) -> float:
        return TABLE.step_s(StepWork(num_prompt_tokens=tokens, num_decode_rows=rows))

    assert all(at(n, m) <= min(at(n + 1, m), at(n, m + 1)) for n in range(1, 250, 7) for m in range(1, 20))


def test_each_part_can_be_made_slower() -> None:
    table = TABLE.model_copy(update={"handoff": HandoffCosts(fixed_s=0.001, token_s=1e-5)})
    prompt, decode = StepWork(num_prompt_tokens=100, num_prompt_pairs=5050), StepWork(num_decode_rows=4)
    slow = table.scaled(prompt=4, handoff=2)
    assert slow.step_s(prompt) == pytest.approx(4 * table.step_s(prompt))
    assert slow.step_s(decode) == pytest.approx(table.step_s(decode))
    assert slow.handoff == HandoffCosts(fixed_s=0.002, token_s=2e-5)


def test_a_machine_of_ones_own_making_is_linear() -> None:
    table = StepCosts.linear(fixed_s=0.005, prompt_token_s=1e-4, decode_row_s=1e-3)
    assert table.step_s(StepWork(num_prompt_tokens=1000)) == pytest.approx(0.105)
    assert table.step_s(StepWork(num_decode_rows=10)) == pytest.approx(0.015)
    assert table.step_s(StepWork(num_prompt_tokens=1000, num_decode_rows=10)) == pytest.approx(0.115)


@pytest.mark.parametrize(
    "rows", [((2, 0.1), (1, 0.2)), ((1, 0.1), (1, 0.2)), ((1, 0.2), (2, 0.1)), ((0, 0.1),), ((1, -1.0),), ()]
)
def test_what_is_no_table_is_refused(rows: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValidationError):
        StepCosts(prompt=rows, decode=((1, 0.1),))


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(TABLE.model_dump_json())
    assert read_costs(str(file)) == TABLE


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"prompt": [[2, 1], [1, 1]], "decode": [[1, 1]]}', b"\xff"])
def test_a_file_that_is_no_table_is_named_with_the_remedy(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "costs.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"costs\.json.*python -m bench\.cost_table"):
        read_costs(str(file))


def test_mock_execution_is_asked_for_with_its_costs_or_refused() -> None:
    inline = json.dumps(TABLE.model_dump(mode="json"))
    for costs in ("costs.json", inline):
        config = load_config(overrides=[f"models.0.execution={{kind: mock, costs: {costs}}}"], environ={})
        assert config.models[0].execution.kind is ExecutionKind.MOCK
        assert ClusterConfig.model_validate_json(config_to_json(config)) == config
    assert load_config(environ={}).models[0].execution.kind is ExecutionKind.REAL
    with pytest.raises(ConfigError, match=r"models\.0\.execution: mock execution needs its costs"):
        load_config(overrides=["models.0.execution.kind=mock"], environ={})
    with pytest.raises(ConfigError, match="set kind to mock, or remove them"):
        load_config(overrides=["models.0.execution.costs=costs.json"], environ={})
