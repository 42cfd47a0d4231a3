"""A cell of mock workers is a cell: answers do not depend on where and how they were made, and the laws hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.cell import MockCell
from bench.traffic import Request, over_http, play
from bench.workloads import Lengths, SharedPrefix, independent
from core.costs import HandoffCosts, StepCosts
from core.types import Role
from tests.support.tiny_model import CONFIG, write_folder

COSTS = StepCosts.linear(fixed_s=0.001, prompt_token_s=1e-5, decode_row_s=1e-4)
WORKLOAD = SharedPrefix(
    num_systems=2,
    system_tokens=40,
    num_shots=2,
    shot_tokens=20,
    turns=(1, 3),
    user=Lengths(median=12, sigma=0.5, longest=24),
    answer=Lengths(median=8, sigma=0.5, longest=16),
    think_s=0.0,
)
SMALL = ("models.0.kv.num_blocks=60", "models.0.kv.block_size=4", "models.0.pools.decode.max_sequences=8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_folder(folder, config={**CONFIG, "max_position_embeddings": 512, "vocab_size": 2000}))


async def answers(cell: MockCell) -> list[tuple[int, ...]]:
    workload = WORKLOAD.conversations([0.002 * number for number in range(24)])
    samples = await play(cell.ask, workload)
    assert all(sample.is_ok for sample in samples), {sample.outcome for sample in samples}
    for worker in cell.workers.values():
        assert worker.engine.pool.counts().is_conserved()
    return sorted(sample.answer for sample in samples)


async def settle(cell: MockCell) -> None:
    """Leases and their like end a moment after the answers."""
    for worker in cell.workers.values():
        while not worker.worker.role.is_idle():
            await asyncio.sleep(0.01)
    cell.check_idle()


async def test_split_equals_local_equals_http_with_prefix_hits_in_small_pools(tiny: str) -> None:
    async with MockCell(COSTS, "models.0.kv.prefix_cache=false", unified=1, model=tiny) as alone:
        expected = await answers(alone)
        await settle(alone)
    async with MockCell(COSTS, *SMALL, "router.mode=split", prefill=2, decode=2, model=tiny) as cell:
        assert await answers(cell) == expected
        url = await cell.serve_http()
        async with over_http(url, cell.model.name) as ask:
            samples = await play(ask, WORKLOAD.conversations([0.0] * 24))
        assert sorted(sample.answer for sample in samples) == expected
        await settle(cell)
        assert cell.cache_hit_ratio() > 0.0
        decodes = [worker.engine.counters() for name, worker in cell.workers.items() if name.startswith("decode")]
        assert all(each.prompt_tokens_computed == 0 or each.num_preemptions for each in decodes)


async def test_a_worker_can_be_made_slower_and_others_added_while_it_runs(tiny: str) -> None:
    async with MockCell(COSTS, unified=1, model=tiny) as cell:
        request = Request(prompt=tuple(range(300, 340)), max_tokens=4)
        quick = await cell.ask(request)
        cell.workers["unified-0"].costs = StepCosts.linear(fixed_s=0.2, prompt_token_s=0.0, decode_row_s=0.0)
        slow = await cell.ask(request)
        assert slow.answer == quick.answer and slow.e2e_s > 0.8
        await cell.add_worker(Role.UNIFIED, COSTS)
        await cell.remove_worker("unified-0")
        while (moved := await cell.ask(request)).decode_worker != "unified-1" or not moved.is_ok:
            await asyncio.sleep(0.05)
        assert moved.answer == quick.answer


async def test_hand_offs_take_what_the_table_says(tiny: str) -> None:
    slow = COSTS.model_copy(update={"handoff": HandoffCosts(fixed_s=0.1, token_s=0.01)})
    async with MockCell(
        COSTS, "transfer.early_reads=false", "router.mode=split", prefill=1, decode=1, model=tiny
    ) as cell:
        cell.workers["decode-0"].costs = slow
        sample = await cell.ask(Request(prompt=tuple(range(300, 364)), max_tokens=2))
        assert sample.is_ok and sample.e2e_s > 0.1 + 64 * 0.01
        await settle(cell)


async def test_a_backend_between_processes_carries_the_small_kv(tiny: str) -> None:
    async with MockCell(COSTS, "router.mode=split", prefill=1, decode=1, model=tiny, backend="tcp") as cell:
        workload = independent([0.0] * 8, prompt=Lengths(median=40), answer=Lengths(median=6))
        samples = await play(cell.ask, workload)
        assert all(sample.is_ok and sample.mode == "split" for sample in samples)
        await settle(cell)
        received = dict(cell.workers["decode-0"].worker.load().kv_bytes_received)
        assert received["tcp"] >= 8 * 40 * 16
