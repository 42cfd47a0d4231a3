"""`baton router|gateway|worker`: what a platform that places processes itself starts, and the addresses that differ."""

import pytest

from baton.cli import main
from core.config import load_config
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["worker", "--model", "none", "--role", "prefill", "--worker-id", "w"], "model 'none' is not configured"),
        (["worker", "--model", "smollm2-135m-instruct", "--role", "unified", "--worker-id", "w"], "no unified pool"),
        (["gateway", "--set", "gateway.listen=0.0.0.0:8000"], "without API keys only this machine is served"),
        (["router", "--set", "router.advertise=0.0.0.0:7000"], "no address that others can dial"),
        (["router", "--config", "/nowhere.yaml"], "cannot read config file"),
    ],
)
def test_a_component_that_cannot_run_as_asked_says_so(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert word in capsys.readouterr().err


def test_who_dials_the_router_takes_what_it_advertises() -> None:
    assert load_config(environ={}).router.address == "127.0.0.1:7000"
    config = load_config(overrides=["router.listen=0.0.0.0:7000", "router.advertise=cell-router:7000"], environ={})
    assert config.router.address == "cell-router:7000"


def test_one_port_of_probes_is_for_one_gateway_process() -> None:
    settings = ["gateway.processes=2", "gateway.http_listen=127.0.0.1:8001"]
    with pytest.raises(ConfigError, match="2 processes cannot share the probes' port"):
        load_config(overrides=settings, environ={})


def test_keys_of_a_file_need_a_place_for_usage() -> None:
    with pytest.raises(ConfigError, match="keys_file needs a database"):
        load_config(overrides=["gateway.access.keys_file=keys.yaml"], environ={})
