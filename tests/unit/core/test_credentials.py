"""What is wrong with a certificate is told at the start, by the file's name; and a CA of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.config import load_config
from core.credentials import Credentials, open_credentials
from core.errors import ConfigError
from core.made_certificates import issue, make_authority, make_certificates
from core.security_config import Identity
from tests.support.tls import MadeCluster

WORKER = "worker.baton"


@pytest.fixture
def made(tmp_path: Path) -> MadeCluster:
    return MadeCluster(tmp_path)


def not_yet(made: MadeCluster) -> None:
    made.write("worker", issue(made.authority, [WORKER], since=datetime.now(UTC) + timedelta(days=1)))


def anothers_key(made: MadeCluster) -> None:
    (made.folder / "worker.key").write_bytes(issue(made.authority, [WORKER]).key_pem)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda made: (made.folder / "worker.pem").unlink(), r"cannot read .*/worker\.pem: No such file"),
        (lambda made: (made.folder / "worker.pem").write_text("hello"), r"worker\.pem has no certificate in PEM"),
        (lambda made: (made.folder / "ca.pem").write_text(""), r"ca\.pem has no certificate in PEM"),
        (lambda made: made.write("worker", made.expired(WORKER)), r"worker\.pem expired at \d{4}-.* UTC; renew it"),
        (not_yet, r"worker\.pem is valid from \d{4}-.* only; is the clock right"),
        (anothers_key, r"worker\.pem and .*/worker\.key are no certificate with its key"),
        (lambda made: made.write("worker", issue(made.authority, ["gateway.baton"])), "should name worker.baton .*"),
        (lambda made: made.write("worker", issue(make_authority(), [WORKER])), r"no CA in .*/ca\.pem has signed"),
        (lambda made: made.trust(make_authority()), r"no CA in .*/ca\.pem has signed"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    made: MadeCluster, spoil: Callable[[MadeCluster], None], told: str
) -> None:
    Credentials(made.files("worker"), Identity.WORKER)
    spoil(made)
    with pytest.raises(ConfigError, match=told):
        Credentials(made.files("worker"), Identity.WORKER)


def test_a_ca_that_has_ended_signs_for_nobody(made: MadeCluster) -> None:
    made.authority = make_authority(days=0.001)
    made.trust(made.authority)
    made.write("worker", issue(made.authority, [WORKER]))
    with pytest.raises(ConfigError, match=r"ca\.pem expired at"):
        Credentials(made.files("worker"), Identity.WORKER)


def test_an_old_ca_beside_the_present_one_is_no_mistake(made: MadeCluster) -> None:
    made.trust(make_authority(days=0.001), made.authority)
    Credentials(made.files("worker"), Identity.WORKER)


def test_a_renewal_counts_from_the_next_look(made: MadeCluster) -> None:
    own = Credentials(made.files("worker"), Identity.WORKER)
    before = own.current()
    assert own.current() is before
    made.write("worker", issue(made.authority, [WORKER], days=50))
    assert own.current().cert != before.cert
    assert own.expires < before.expires


def test_a_folder_of_certificates_is_made_once_and_serves_every_process(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    settings = [f"security.folder={folder}", "security.tls=auto", "security.domain=prod.baton"]
    config = load_config(overrides=settings, environ={})
    assert len(make_certificates(folder, domain="prod.baton")) == 2 * (1 + len(Identity))
    for identity in Identity:
        own = open_credentials(config.security, identity)
        assert own is not None and own.name(identity) == f"{identity}.prod.baton"
    assert make_certificates(folder, domain="prod.baton") == []
    assert os.stat(folder).st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_what_is_missing_or_ends_soon_is_made_anew(tmp_path: Path, made: MadeCluster) -> None:
    folder = tmp_path / "tls"
    make_certificates(folder, domain="a")
    (folder / "router.key").unlink()
    assert {path.name for path in make_certificates(folder, domain="a")} == {"router.key", "router.pem"}
    assert len(make_certificates(folder, domain="b")) == 2 * len(Identity), "another domain, by the same CA"
    short = make_authority(days=20)
    (folder / "ca.pem").write_bytes(short.pem)
    (folder / "ca.key").write_bytes(short.key_pem)
    assert len(make_certificates(folder, domain="b")) == 2 * (1 + len(Identity)), "and a CA with all that it signed"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make certificates in"):
        make_certificates(tmp_path / "file" / "tls", domain="baton")
