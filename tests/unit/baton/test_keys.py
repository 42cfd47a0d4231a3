"""``baton keys``: the operator's hand on the database of keys."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from deploy.launcher import EXIT_CONFIG


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"gateway.access.database={tmp_path / 'keys.db'}"


def keys(capsys: pytest.CaptureFixture[str], database: str, *arguments: str) -> Any:
    assert main(["keys", *arguments, "--json", "--set", database]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_key_is_made_listed_and_revoked(capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path) -> None:
    amounts = ("--requests-per-minute=60", "--tokens-per-day=5000", "--max-streams=4", "--expires-in-days=30")
    made = keys(capsys, database, "create", "--tenant=acme", "--model=a", "--model=b", "--priority=low", *amounts)
    assert made["key"].startswith(f"sk-baton-{made['id']}-")
    assert (made["models"], made["priority"], made["max_streams"]) == (["a", "b"], "low", 4)
    assert made["expires_at"] - made["created_at"] == 30 * 86_400
    key = made.pop("key")
    assert keys(capsys, database, "list") == [made]
    assert keys(capsys, database, "list", "--tenant=other") == []
    assert keys(capsys, database, "revoke", made["id"])["revoked_at"]
    assert keys(capsys, database, "usage", "--tenant=acme") == {
        "object": "list",
        "data": [],
        "total": {"num_requests": 0, "num_prompt_tokens": 0, "num_cached_tokens": 0, "num_completion_tokens": 0},
    }
    secret = key.rsplit("-", 1)[1].encode()
    for path in tmp_path.iterdir():
        assert secret not in path.read_bytes(), "only a hash is kept"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_people_see(capsys: pytest.CaptureFixture[str], database: str) -> None:
    assert main(["keys", "create", "--tenant", "acme", "--set", database]) == 0
    out = capsys.readouterr().out
    assert "only time" in out
    key_id = out.split("sk-baton-")[1][:12]
    assert main(["keys", "list", "--set", database]) == 0
    assert [key_id, "acme"] == capsys.readouterr().out.splitlines()[1].split()[:2]
    assert main(["keys", "revoke", key_id, "--set", database]) == 0
    assert "within 5 s" in capsys.readouterr().out
    assert main(["keys", "usage", "--set", database]) == 0
    assert "total" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["create", "--tenant", "a/b"], "--tenant"),
        (["create", "--tenant", "a", "--max-streams", "0"], "--max-streams"),
        (["create", "--tenant", "a", "--expires-in-days", "-1"], "--expires-in-days"),
        (["revoke", "nope"], "no key 'nope'"),
        (["usage", "--since", "today"], "2026-11-30"),
        (["list", "--set", "gateway.access.database=null"], "gateway.access.database"),
        (["list", "--set", "gateway.access.database=/no/such/folder/keys.db"], "/no/such/folder"),
        (["list", "--set", "gateway.access.database=/proc/version"], "gateway.access.database"),
        (["list", "--set", "gateway.access.database=postgresql://u@127.0.0.1:1/db"], "gateway.access.database"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], told: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments
    assert main(["keys", command, "--set", database, *rest]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: error: ")
    assert told in line
