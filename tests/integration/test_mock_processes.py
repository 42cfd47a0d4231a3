"""A cluster of real processes under mock execution: it answers, and nobody can take it for one that runs its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.status import render
from core.costs import StepCosts
from core.types import ExecutionKind
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import TINY, ask, questions, tiny_settings

pytestmark = pytest.mark.processes


async def test_it_answers_and_says_everywhere_that_no_model_is_run(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(
        StepCosts.linear(fixed_s=0.001, prompt_token_s=1e-5, decode_row_s=1e-4).model_dump_json(), encoding="utf-8"
    )
    settings = (*tiny_settings(tmp_path), f"models.0.execution={{kind: mock, costs: {costs}}}")
    async with ProcessCluster(tmp_path, *settings) as cluster:
        (question,) = questions(seed=1, count=1, longest=60, num_tokens=20)
        first, second = await ask(cluster, question), await ask(cluster, question)
        assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        assert len(first["choices"][0]["token_ids"]) == question.num_tokens

        status = await cluster.status()
        assert [model.execution for model in status.models] == [ExecutionKind.MOCK]
        assert f"MOCK EXECUTION: no model is run, all answers of {TINY} are made up" in render(status)
        listed = (await cluster.http.get("/v1/models")).json()["data"]
        assert [model["execution"] for model in listed] == ["mock"]
        worker = await cluster.worker("decode-0")
        metrics = (await cluster.http.get(f"http://{worker.registration.http_address}/metrics")).text
        assert 'baton_mock_execution{model="tiny",role="decode"} 1.0' in metrics
        assert "mock execution: no model is run" in cluster.logs()
