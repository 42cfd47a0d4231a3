"""What a gateway remembers of the cluster between the router's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from core.clock import MonotonicClock
from core.ids import GatewayId, Incarnation
from core.types import ClusterView, GatewayReport, ModelRecord
from gateway.ports import RouterPort
from gateway.reporter import Reporter

MODEL = ModelRecord(name="m", format_hash="f", block_size=16, max_context=100, vocab_size=10)


class Views:
    """A router that answers with these, one after the other."""

    def __init__(self, *models: tuple[ModelRecord, ...]) -> None:
        self._models = iter(models)

    async def report_gateway(self, report: GatewayReport) -> ClusterView:
        return ClusterView(models=next(self._models), usable=())


async def test_the_size_of_blocks_outlives_a_router_that_has_no_workers_yet() -> None:
    """Else the first prompts after its start would be placed without regard to what workers hold of them."""
    bigger = replace(MODEL, block_size=32)
    reporter = Reporter(
        cast("RouterPort", Views((), (MODEL,), (), (bigger,))), MonotonicClock(), GatewayId("g"), Incarnation(1)
    )
    seen = []
    for _ in range(4):
        await reporter.report()
        seen.append(reporter.block_size("m"))
    assert seen == [0, 16, 16, 32]
