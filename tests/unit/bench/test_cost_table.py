"""Cost tables are measured from an engine, and the one that is kept is one."""

from __future__ import annotations

from pathlib import Path

from bench import cost_table
from bench.cost_table import Stepper, measure
from core.costs import StepWork, read_costs
from tests.support.tiny_model import CONFIG, write_folder

COSTS = Path(cost_table.__file__).parent / "costs"


def test_a_table_is_measured_from_the_engine_itself(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", config={**CONFIG, "max_position_embeddings": 2048})
    stepper = Stepper(str(folder), "auto", rounds=1)
    table = measure(stepper, prompts=(1, 64), batches=(1, 2), where="here")
    assert [number for number, _ in table.prompt] == [1, 64] and [number for number, _ in table.decode] == [1, 2]
    assert table.step_s(StepWork(num_prompt_tokens=64)) > 0 < table.step_s(StepWork(num_decode_rows=2))
    assert table.measured == "here"
    assert stepper.engine.pool.counts().is_idle() and not stepper.engine.has_work


def test_every_table_that_is_kept_says_where_it_was_measured() -> None:
    tables = {file.stem: read_costs(str(file)) for file in COSTS.glob("*.json")}
    assert "smollm2-135m-instruct" in tables
    for name, table in tables.items():
        assert name in table.measured and table.handoff is not None
        assert table.step_s(StepWork(num_prompt_tokens=512)) > 8 * table.step_s(StepWork(num_decode_rows=1))
