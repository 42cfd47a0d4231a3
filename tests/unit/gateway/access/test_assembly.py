"""What a gateway says and refuses at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.access_config import AccessConfig
from core.errors import ConfigError
from core.ids import Incarnation
from gateway.access.assembly import OpenAccess, open_access


async def test_without_keys_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    access = await open_access(AccessConfig(), incarnation=Incarnation(1))
    assert isinstance(access, OpenAccess)
    assert "only this machine is served" in caplog.text


async def test_a_database_without_keys_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = await open_access(AccessConfig(database=str(tmp_path / "keys.db")), incarnation=Incarnation(1))
    await access.close()
    assert "baton keys create" in caplog.text


@pytest.mark.parametrize("where", ["environment", "file"])
async def test_a_short_admin_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "admin"
    path.write_text("hush")
    config = AccessConfig(database=str(tmp_path / "keys.db"), admin_key_file=str(path) if where == "file" else None)
    if where == "environment":
        monkeypatch.setenv("BATON_ADMIN_KEY", "hush")
    with pytest.raises(ConfigError, match="16 characters") as refused:
        await open_access(config, incarnation=Incarnation(1))
    assert "hush" not in refused.value.message
