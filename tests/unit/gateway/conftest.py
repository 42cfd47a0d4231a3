"""A whole gateway over a scripted cluster and the made-up tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.support import site
from tests.support.site import MAX_CONTEXT, Site, cluster_config, served_model

__all__ = ["MAX_CONTEXT", "OpenSite", "Site", "cluster_config", "open_site", "served_model"]

OpenSite = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def open_site() -> OpenSite:
    return site.open_site
