"""The command line says what is wrong in one line and with a stable exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import process
from baton.cli import main
from deploy.launcher import EXIT_CONFIG


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "gatewy.listen=1"], "gatewy: unknown key; known here: models, gateway, router"),
        (["--set", "router.listen=here"], "'here' is not HOST:PORT"),
        (["--set", "nothing"], "is not KEY=VALUE"),
        (["--set", "gateway.listen=0.0.0.0:80"], "name a database of keys with --set gateway.access.database=FILE"),
        (["--config", "/does/not/exist.yaml"], "cannot read config file /does/not/exist.yaml"),
    ],
)
def test_a_bad_configuration_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", *arguments]) == EXIT_CONFIG
    line = only_line(capsys)
    assert line.startswith("baton: error: ")
    assert expected in line


@pytest.mark.parametrize("size", ["prefil=2", "decode", "decode=many"])
def test_a_size_that_is_none_is_told_before_anybody_is_asked(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "m", "prefill=1", size]) == EXIT_CONFIG
    assert f"'{size}' is not a size: say one or more of prefill=N, decode=N, unified=N" in only_line(capsys)


def test_a_missing_model_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--launcher", "process", "--set", "models.0.path=/no/such.gguf"]) == EXIT_CONFIG
    assert "/no/such.gguf" in only_line(capsys)


def test_a_file_that_is_no_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("not a model")
    assert main(["config", "check", "--set", f"models.0.path={path}"]) == EXIT_CONFIG
    assert str(path) in only_line(capsys)


def test_the_shown_configuration_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "router.heartbeat_timeout_s=5"]) == 0
    shown = capsys.readouterr().out
    file = tmp_path / "cluster.yaml"
    file.write_text(shown)
    assert main(["config", "show", "--config", str(file)]) == 0
    assert capsys.readouterr().out == shown
    assert "heartbeat_timeout_s: 5" in shown


def test_a_worker_of_an_unknown_pool_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["worker", "--model", "smollm2-135m-instruct", "--role", "unified", "--worker-id", "w"]
    assert process.main(arguments) == EXIT_CONFIG
    assert only_line(capsys).endswith("has no unified pool; pools: prefill, decode")


def test_a_worker_of_an_unknown_model_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert process.main(["worker", "--model", "x", "--role", "decode", "--worker-id", "w"]) == EXIT_CONFIG
    assert "model 'x' is not configured" in only_line(capsys)
