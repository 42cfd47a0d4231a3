"""Public request traces as scripts: Mooncake jsonl, Azure csv, BurstGPT csv, each also gzipped.

Traces have lengths and times, and Mooncake's have a hash for each 512 tokens of a prompt: equal hashes are equal
tokens, so that prefixes are shared exactly as they were. Prompts of the others share nothing.
"""

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO

from bench.client.scripts import Line, Part, Script
from core.errors import ConfigError

MOONCAKE_BLOCK = 512
_AZURE = {"timestamp": "TIMESTAMP", "prompt": "ContextTokens", "answer": "GeneratedTokens"}
_BURST = {"timestamp": "Timestamp", "prompt": "Request tokens", "answer": "Response tokens"}


def read_trace(path: Path, *, limit: int | None = None) -> list[Script]:
    """The first ``limit`` requests, by time, the first of them at 0. Which format it is is seen from its first line.
    Requests without an answer (failures, in BurstGPT) are left out. Raises ConfigError that names the line."""
    try:
        with _open(path) as file:
            scripts = list(_read(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no trace that can be read: {error}") from None
    if not scripts:
        raise ConfigError(f"the trace {path} has no request with an answer")
    scripts.sort(key=lambda script: script.at_s)
    began_s = scripts[0].at_s
    return [replace(script, at_s=script.at_s - began_s) for script in scripts[:limit]]


def window(scripts: Sequence[Script], *, from_s: float = 0.0, duration_s: float = float("inf")) -> list[Script]:
    """Those that begin within; the window begins at 0."""
    chosen = [script for script in scripts if from_s <= script.at_s < from_s + duration_s]
    return [replace(script, at_s=script.at_s - from_s) for script in chosen]


def clipped(scripts: Sequence[Script], *, longest: int) -> list[Script]:
    """Prompts and answers together no longer than ``longest`` tokens: what is beyond is cut off, the prompt's end
    first. For models whose context is shorter than the trace's."""
    return [replace(script, lines=tuple(_clip(line, longest) for line in script.lines)) for script in scripts]


def _clip(line: Line, longest: int) -> Line:
    max_tokens = min(line.max_tokens, max(1, longest // 2))
    left, parts = longest - max_tokens, []
    for part in line.parts:
        if left > 0:
            parts.append(part if part.num_tokens <= left else replace(part, num_tokens=left))
        left -= part.num_tokens
    return replace(line, parts=tuple(parts), max_tokens=max_tokens)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8-sig", newline="")


def _read(file: IO[str]) -> Iterator[Script]:
    first = file.readline()
    if first.lstrip().startswith("{"):
        yield from _mooncake(first, file)
        return
    names = next(csv.reader([first]), [])
    for columns in (_AZURE, _BURST):
        if set(columns.values()) <= set(names):
            yield from _table(csv.DictReader(file, fieldnames=names), columns)
            return
    raise ValueError(
        "its first line is neither a JSON object (Mooncake) nor a header with the columns "
        f"{', '.join(_AZURE.values())} (Azure) or {', '.join(_BURST.values())} (BurstGPT)"
    )


def _mooncake(first: str, file: IO[str]) -> Iterator[Script]:
    for number, text in enumerate([first, *file], 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            at_s, num_tokens, max_tokens = row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"])
            hashes = [int(each) for each in row.get("hash_ids", ())]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number}: {type(error).__name__} {error}") from None
        if max_tokens > 0 and num_tokens > 0:
            yield _script(at_s, _hashed(hashes, num_tokens, number), max_tokens)


def _hashed(hashes: Sequence[int], num_tokens: int, number: int) -> tuple[Part, ...]:
    parts = []
    for index, each in enumerate(hashes):
        length = min(MOONCAKE_BLOCK, num_tokens - index * MOONCAKE_BLOCK)
        if length > 0:
            # The words of a shorter last block are the first ones of a whole block with the same hash.
            parts.append(Part(key=f"hash/{each}", num_tokens=length))
    rest = num_tokens - sum(part.num_tokens for part in parts)
    return (*parts, Part(key=f"row/{number}", num_tokens=rest)) if rest > 0 else tuple(parts)


def _table(rows: "csv.DictReader[str]", columns: dict[str, str]) -> Iterator[Script]:
    for number, row in enumerate(rows, 2):
        try:
            at_s = _seconds(row[columns["timestamp"]])
            num_tokens, max_tokens = int(row[columns["prompt"]]), int(row[columns["answer"]])
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from None
        if max_tokens > 0 and num_tokens > 0:
            yield _script(at_s, (Part(key=f"row/{number}", num_tokens=num_tokens),), max_tokens)


def _seconds(text: str) -> float:
    """Seconds as such (BurstGPT), or a date and time with up to seven digits of a second (Azure)."""
    try:
        return float(text)
    except ValueError:
        pass
    whole, _, digits = text.partition(".")
    moment = datetime.fromisoformat(whole + "+00:00")
    return moment.timestamp() + float(f"0.{digits or 0}")


def _script(at_s: float, parts: tuple[Part, ...], max_tokens: int) -> Script:
    return Script(at_s=at_s, lines=(Line(parts=parts, max_tokens=max_tokens),), label="trace")
