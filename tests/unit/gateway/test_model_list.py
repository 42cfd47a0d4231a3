"""What ``/v1/models`` says of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.types import ExecutionKind
from tests.support.site import open_site, served_model


@pytest.mark.parametrize("kind", ExecutionKind)
async def test_a_model_whose_answers_are_made_up_is_listed_as_such(kind: ExecutionKind) -> None:
    async with open_site(model=replace(served_model(), execution=kind)) as site:
        listed = (await site.client.get("/v1/models")).json()["data"]
        shown = (await site.client.get("/v1/models/m")).json()
    assert listed == [shown]
    assert shown.get("execution") == (None if kind is ExecutionKind.REAL else "mock")
