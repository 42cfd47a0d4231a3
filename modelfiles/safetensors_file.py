"""Reads safetensors files: eight bytes of header length, a JSON header, raw little-endian tensors.

Read here and not with the `safetensors` package because that needs torch for bfloat16, and because a truncated file
must be told from a good one before the first tensor is touched.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modelfiles.errors import ModelFileError
from modelfiles.json_file import JsonFile
from modelfiles.tensors import Array

REMEDY = "download the file again"
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    file: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsSource:
    """All tensors of a folder, in one file or in shards. BF16 is widened to float32 (exactly)."""

    def __init__(self, folder: Path) -> None:
        weight_map = _weight_map(folder)
        self.files = tuple(sorted(set(weight_map.values()))) or (folder / "model.safetensors",)
        self._maps: list[mmap.mmap] = []
        self._entries: dict[str, _Entry] = {}
        for index, path in enumerate(self.files):
            self._maps.append(self._read(index, path))
        for name, path in weight_map.items():
            if name not in self._entries or self.file_of(name) != path:
                raise ModelFileError(str(path), f"lacks tensor '{name}', which the index puts there", REMEDY)

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def file_of(self, name: str) -> Path:
        entry = self._entries.get(name)
        return self.files[0].parent if entry is None else self.files[entry.file]

    def load(self, name: str) -> Array:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(str(self.files[0].parent), f"tensor '{name}' is missing", "use a complete model")
        raw = memoryview(self._maps[entry.file])[entry.begin : entry.end]
        if entry.dtype == "BF16":
            wide = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(entry.shape)
        dtype = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[entry.dtype]
        array: Array = np.frombuffer(raw, dtype=dtype).reshape(entry.shape)
        return array

    def _read(self, index: int, path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                    raise ModelFileError(str(path), "is truncated or no safetensors file", REMEDY)
                header = json.loads(file.read(length))
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(
                str(path), f"cannot be read ({error.strerror})", "check the path and its rights"
            ) from None
        except ModelFileError:
            raise
        except ValueError:
            raise ModelFileError(str(path), "has a damaged header", REMEDY) from None
        if not isinstance(header, dict):
            raise ModelFileError(str(path), "has a damaged header", REMEDY)
        for name, value in header.items():
            if name != "__metadata__":
                self._entries[name] = _entry(index, path, name, value, 8 + length, size)
        return mapped


def _entry(index: int, path: Path, name: str, value: object, base: int, size: int) -> _Entry:
    try:
        assert isinstance(value, dict)
        dtype, shape, (begin, end) = (
            str(value["dtype"]),
            tuple(map(int, value["shape"])),
            map(int, value["data_offsets"]),
        )
        assert min(shape, default=0) >= 0
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError):
        raise ModelFileError(str(path), f"has a damaged entry for '{name}'", REMEDY) from None
    if dtype not in ITEM_BYTES:
        raise ModelFileError(
            str(path), f"stores '{name}' as {dtype}", f"use weights stored as one of {', '.join(ITEM_BYTES)}"
        )
    if not 0 <= begin <= end <= size - base:
        raise ModelFileError(str(path), f"ends before tensor '{name}' does (truncated)", REMEDY)
    num_items = 1
    for extent in shape:
        num_items *= extent
    if num_items * ITEM_BYTES[dtype] != end - begin:
        raise ModelFileError(str(path), f"has a damaged entry for '{name}'", REMEDY)
    return _Entry(file=index, dtype=dtype, shape=shape, begin=base + begin, end=base + end)


def _weight_map(folder: Path) -> dict[str, Path]:
    """Which shard holds which tensor, by the index; empty for a model in one file."""
    if (folder / "model.safetensors").exists():
        return {}
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        raise ModelFileError(
            str(folder),
            "has neither model.safetensors nor model.safetensors.index.json",
            "use a complete Hugging Face folder",
        )
    names = JsonFile(index_path).table("weight_map") or {}
    weight_map = {name: folder / str(file_name) for name, file_name in names.items()}
    for path in weight_map.values():
        if path.parent != folder:
            raise ModelFileError(str(index_path), f"names a file outside its folder ({path.name})", REMEDY)
        if not path.exists():
            raise ModelFileError(str(path), "is named by the index but missing", "download all shards")
    if not weight_map:
        raise ModelFileError(str(index_path), "names no files", REMEDY)
    return weight_map
