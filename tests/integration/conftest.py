"""Engines are expensive to load, so the tests of one session share them. A test leaves them idle."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from core.config import load_config
from core.types import Role
from engine.engine import Engine
from tests.support.local_cluster import SETTINGS
from worker.process import load_engine


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of the HTTP server run on the product's loop: its transports are not asyncio's."""
    is_server = item.path.name == "test_http_server.py"
    return {"uvloop": uvloop.new_event_loop} if is_server else {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def loaded_engines() -> Iterator[dict[str, Engine]]:
    config = load_config(overrides=SETTINGS, environ={})
    engines = {f"{role}-0": load_engine(config, config.models[0], role) for role in (Role.PREFILL, Role.DECODE)}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engines(loaded_engines: dict[str, Engine]) -> Iterator[dict[str, Engine]]:
    """By worker id. Checks laws 1 and 2 when the test is over."""
    yield loaded_engines
    for worker_id, engine in loaded_engines.items():
        counts = engine.pool.counts()
        assert counts.is_conserved() and counts.is_idle(), (worker_id, counts)
        assert not engine.has_work, worker_id
