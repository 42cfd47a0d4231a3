"""Keys that a file holds: the file is the whole truth about them, and a mistake in it takes no key away."""

import os
from pathlib import Path

import pytest
import yaml

from baton.keys import make_key
from core.errors import ConfigError
from gateway.access.key_file import KeyFile
from gateway.access.keys import KeyRecord, hash_secret, key_text, new_key, split_key


class _Nothing:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find_key(self, key_id: str) -> KeyRecord | None:
        self.asked.append(key_id)
        return None


def _write(path: Path, *entries: dict[str, object]) -> None:
    """As a platform replaces a mounted file: another one at once."""
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump({"keys": list(entries)}))
    fresh.rename(path)


async def test_a_key_is_found_by_its_text_and_by_its_hash(tmp_path: Path) -> None:
    (plain_id, plain), (hashed_id, hashed) = new_key(), new_key()
    path = tmp_path / "keys.yaml"
    _write(
        path,
        {"key": key_text(plain_id, plain), "tenant": "acme", "requests_per_minute": 5},
        {"id": hashed_id, "sha256": hash_secret(hashed_id, hashed).hex(), "tenant": "other", "expires_at": 100},
    )
    rest = _Nothing()
    keys = KeyFile(str(path), rest)
    first, second = await keys.find_key(plain_id), await keys.find_key(hashed_id)
    assert first is not None and first.proves(plain) and first.terms.requests_per_minute == 5
    assert second is not None and second.proves(hashed) and not second.proves(plain) and not second.is_valid(101)
    assert rest.asked == []
    assert await keys.find_key("0" * 12) is None and rest.asked == ["0" * 12]


async def test_what_the_file_says_now_holds_without_a_restart(tmp_path: Path) -> None:
    (old_id, old), (new_id, new) = new_key(), new_key()
    path = tmp_path / "keys.yaml"
    _write(path, {"key": key_text(old_id, old), "tenant": "acme"})
    keys = KeyFile(str(path), _Nothing())
    _write(path, {"key": key_text(new_id, new), "tenant": "acme"})
    assert await keys.find_key(old_id) is None
    found = await keys.find_key(new_id)
    assert found is not None and found.proves(new)


@pytest.mark.parametrize("mistake", ["keys: [", "keys: [{tenant: acme}]", "\xff", None])
async def test_a_mistake_in_the_file_takes_no_key_away(
    tmp_path: Path, mistake: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key_id, secret = new_key()
    path = tmp_path / "keys.yaml"
    _write(path, {"key": key_text(key_id, secret), "tenant": "acme"})
    keys = KeyFile(str(path), _Nothing())
    if mistake is None:
        path.unlink()
    else:
        path.write_bytes(mistake.encode("latin-1"))
        os.utime(path, ns=(1, 1))
    assert await keys.find_key(key_id) is not None
    assert "keys stay as they were" in caplog.text and secret not in caplog.text


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"tenant": "acme"}, "either 'key', or 'id' and 'sha256'"),
        ({"tenant": "acme", "id": "0" * 12}, "either 'key'"),
        ({"tenant": "acme", "key": "sk-short"}, "not of the form"),
        ({"key": key_text("0" * 12, "x" * 43)}, "tenant"),
        ({"tenant": "acme", "key": key_text("0" * 12, "x" * 43), "requests": 5}, "requests"),
    ],
)
def test_a_bad_file_is_refused_at_the_start(tmp_path: Path, entry: dict[str, object], word: str) -> None:
    path = tmp_path / "keys.yaml"
    _write(path, entry)
    with pytest.raises(ConfigError) as refused:
        KeyFile(str(path), _Nothing())
    assert word in refused.value.message and "xxxx" not in refused.value.message


async def test_a_made_key_fits_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_key({"tenant": "acme", "priority": "high", "models": ["m"]}) == 0
    out = capsys.readouterr().out
    parts = split_key(out.splitlines()[0].rpartition(" ")[2])
    assert parts is not None
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": yaml.safe_load(out)}))
    found = await KeyFile(str(path), _Nothing()).find_key(parts[0])
    assert found is not None and found.proves(parts[1])
    assert found.terms.priority == "high" and found.terms.models == ("m",)
    assert parts[1] not in path.read_text()
