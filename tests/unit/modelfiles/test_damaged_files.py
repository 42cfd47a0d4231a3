"""Files damaged at random: refused in one line that names the file, or harmless; nothing else ever happens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelfiles import open_model
from modelfiles.errors import ModelFileError
from tests.support.tiny_model import write_folder, write_gguf

HEADER_BYTES = 14_000
"""Of the tiny GGUF file: metadata and the table of tensors."""
WORDS = tuple(number.to_bytes(8, "little") for number in (0, 1, 2**31, 2**40, 2**64 - 1))
VALUES = (None, -1, 0, 2**70, 1.5, float("inf"), float("nan"), "x", "../x", True, [], [-1, -32], {}, {"a": 1})


def use(path: Path) -> None:
    """All that a gateway and a worker read."""
    files = open_model(str(path))
    for name in files.tensor_names():
        files.load_tensor(name)
    files.tokenizer()
    files.chat_template()
    assert files.config.num_layers > 0


def is_refused(path: Path, root: Path) -> bool:
    try:
        use(path)
    except ModelFileError as error:
        message = str(error)
        assert str(root) in message and "; " in message and "\n" not in message, message
        return True
    return False


def damaged(content: bytes, rng: random.Random) -> bytes:
    raw, place = bytearray(content), rng.randrange(min(len(content), HEADER_BYTES))
    match rng.choice(("cut", "flip", "word")):
        case "cut":
            return bytes(raw[: rng.randrange(len(raw))])
        case "flip":
            raw[place] = rng.randrange(256)
        case "word":
            raw[place : place + 8] = rng.choice(WORDS)
    return bytes(raw)


def places(content: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


def other_value(content: bytes, rng: random.Random, *, is_safetensors: bool) -> bytes:
    """One value of its JSON replaced by one of another type or size."""
    start, end = (8, 8 + int.from_bytes(content[:8], "little")) if is_safetensors else (0, len(content))
    parsed = json.loads(content[start:end])
    *way, last = rng.choice(list(places(parsed)))
    inner = parsed
    for name in way:
        inner = inner[name]
    inner[last] = rng.choice(VALUES)
    encoded = json.dumps(parsed).encode()
    return (len(encoded).to_bytes(8, "little") if is_safetensors else b"") + encoded + content[end:]


def check_gguf(folder: Path, seed: int, count: int) -> None:
    rng, path = random.Random(seed), folder / "tiny.gguf"
    content = write_gguf(path).read_bytes()
    num_refused = 0
    for _ in range(count):
        path.write_bytes(damaged(content, rng))
        num_refused += is_refused(path, path)
    assert num_refused > count // 3


def check_folder(folder: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    contents = {path: path.read_bytes() for path in sorted(write_folder(folder, num_shards=2).iterdir())}
    num_refused = 0
    for _ in range(count):
        path = rng.choice(list(contents))
        if rng.random() < 0.6:
            path.write_bytes(other_value(contents[path], rng, is_safetensors=path.suffix == ".safetensors"))
        else:
            path.write_bytes(damaged(contents[path], rng))
        num_refused += is_refused(folder, folder)
        path.write_bytes(contents[path])
    assert num_refused > count // 3


def test_a_damaged_gguf_file_is_refused_by_name_or_harmless(tmp_path: Path) -> None:
    check_gguf(tmp_path, seed=1, count=150)


def test_a_damaged_folder_is_refused_by_name_or_harmless(tmp_path: Path) -> None:
    check_folder(tmp_path, seed=1, count=100)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 14))
def test_much_more_damage(seed: int, tmp_path: Path) -> None:
    check_gguf(tmp_path, seed, count=3000)
    check_folder(tmp_path / "folder", seed, count=1500)


def test_nested_lists_do_not_exhaust_the_stack(tmp_path: Path) -> None:
    """Metadata of arrays in arrays in arrays."""
    nested = b"".join((9).to_bytes(4, "little") + (1).to_bytes(8, "little") for _ in range(5000))
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path = tmp_path / "nested.gguf"
    path.write_bytes(head + (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + nested)
    assert is_refused(path, path)
