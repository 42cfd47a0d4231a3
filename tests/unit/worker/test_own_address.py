"""``worker.host: auto`` is the address of the interface that leads to the router."""

import pytest

from core.config import load_config
from core.errors import ConfigError
from worker.own_address import with_own_address


def test_it_is_that_of_the_way_to_the_router() -> None:
    config = load_config(overrides=["worker.host=auto", "router.advertise=127.0.0.2:7000"], environ={})
    assert with_own_address(config).worker.host.startswith("127.")


def test_one_that_is_named_stays() -> None:
    config = load_config(overrides=["worker.host=127.0.0.9"], environ={})
    assert with_own_address(config) is config


def test_a_router_that_no_name_leads_to_is_told_with_the_remedy() -> None:
    config = load_config(overrides=["worker.host=auto", "router.advertise=no-such-router.invalid:7000"], environ={})
    with pytest.raises(ConfigError, match=r"no-such-router\.invalid:7000 .*: correct router\.advertise"):
        with_own_address(config, limit_s=0)
