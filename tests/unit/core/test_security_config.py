"""The section ``security``: which files a process proves itself by."""

from pathlib import Path

import pytest

from core.config import dump_config, load_config
from core.errors import ConfigError
from core.security_config import Identity

FILES = ("security.tls=files", "security.cert=/t/{role}.pem", "security.key=/t/{role}.key", "security.ca=/t/ca.pem")


def test_one_configuration_serves_every_process_of_a_machine() -> None:
    security = load_config(overrides=FILES, environ={}).security
    files = security.files(Identity.WORKER)
    assert files is not None
    assert (files.cert, files.key, files.ca) == ("/t/worker.pem", "/t/worker.key", "/t/ca.pem")


def test_made_up_certificates_lie_in_one_folder_by_identity() -> None:
    security = load_config(overrides=["security.tls=auto", "security.folder=/made"], environ={}).security
    files = security.files(Identity.OPERATOR)
    assert files is not None and (files.cert, files.ca) == ("/made/operator.pem", "/made/ca.pem")


def test_without_tls_there_are_no_files_and_off_is_a_word_of_yaml() -> None:
    security = load_config(overrides=["security.tls=off"], environ={}).security
    assert not security.is_on and security.files(Identity.ROUTER) is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["security.tls=files"], "no cert, key, ca"),
        (FILES[:3], "no ca"),
        (["security.cert=/t/a.pem"], "cert given, and tls is 'off'"),
        (["security.tls=auto", "security.key=/t/a.key"], "key given, and tls is 'auto'"),
        (["security.tls=on"], "security.tls"),
        (["security.tls=auto", "transfer.backend=dist"], "transfer.backend is 'dist', whose library has no TLS"),
        (["security.domain=UPPER"], "is no domain"),
        (["security.certificate=x"], "unknown key; known here: tls, cert"),
    ],
)
def test_half_of_a_setting_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(overrides=overrides, environ={})


def test_what_is_dumped_loads_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "effective.yaml"
    config = load_config(overrides=FILES, environ={})
    path.write_text(dump_config(config))
    assert load_config(str(path), environ={}) == config
