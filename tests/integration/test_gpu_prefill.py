"""A prefill worker on the kernels of a GPU, interpreted, hands over to a decode worker on the kernels of a CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.engine import Engine, EngineConfig
from modelfiles import open_model
from tests.support.cluster import ProcessCluster
from tests.support.engine_runs import make_sequence, run
from tests.support.tiny_cluster import TINY, tiny_settings

pytestmark = pytest.mark.processes

NUM_TOKENS = 6


@pytest.mark.timeout(300)
async def test_its_kv_is_what_the_cpu_would_have_computed(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    prompts = [random.Random(length).choices(range(2, 250), k=length) for length in (1, 17, 40)]
    files = open_model(str(tmp_path / TINY))
    engine = Engine(files, EngineConfig(device="cpu", num_blocks=40, max_context=256))
    expected = []
    for prompt in prompts:
        sequence = make_sequence(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        expected.append(run(engine, sequence).tokens[sequence.key])
    engine.close()
    devices = ("models.0.pools.prefill.device=interpreter", "models.0.pools.decode.device=cpu")
    async with ProcessCluster(
        tmp_path,
        *settings,
        *devices,
        "models.0.dtype=float32",
        "models.0.pools.prefill.max_step_tokens=24",
        "models.0.pools.prefill.max_sequences=8",
    ) as cluster:
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await cluster.complete(
                prompt, model=TINY, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, return_token_ids=True
            )
            assert answer["choices"][0]["token_ids"] == tokens
        num_tokens = sum(map(len, prompts))
        status = await cluster.wait_for(
            f"{num_tokens} prompt tokens computed by the prefill worker",
            lambda status: any(worker.load.prompt_tokens_computed == num_tokens for worker in status.workers),
            20,
        )
        workers = {worker.registration.role: worker for worker in status.workers}
        assert workers["decode"].load.prompt_tokens_computed == 0
