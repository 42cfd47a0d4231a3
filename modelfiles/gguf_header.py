"""Walks the header of a GGUF file: metadata values and the table of tensors. No tensor is touched.

The `gguf` package has a reader too, but it makes a numpy object for each of a vocabulary's strings: seconds at every
start of every process. Layout: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gguf

from modelfiles.errors import ModelFileError

REMEDY = "download the file again"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies in the file. `shape` has the slowest dimension first, in elements."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    values: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path, content: memoryview) -> GGUFHeader:
    """Parses the header of `content`, the whole file. Raises ModelFileError for what is cut, damaged or unknown."""
    try:
        return _Walk(path, content).header()
    except (struct.error, IndexError, OverflowError):
        raise ModelFileError(str(path), "is truncated", REMEDY) from None
    except (UnicodeDecodeError, RecursionError):
        raise ModelFileError(str(path), "has a damaged header", REMEDY) from None


class _Walk:
    """A position in the file that moves forward as values are read."""

    def __init__(self, path: Path, content: memoryview) -> None:
        self._path = path
        self._content = content
        self._at = 0

    def header(self) -> GGUFHeader:
        if bytes(self._content[:4]) != b"GGUF":
            raise ModelFileError(str(self._path), "is no GGUF file", "give a .gguf file or a Hugging Face folder")
        self._at = 4
        version = self._integer("I")
        if version not in (2, 3):
            raise ModelFileError(
                str(self._path), "is of an unknown GGUF version", "use a little-endian GGUF of version 2 or 3"
            )
        num_tensors, num_values = self._count(), self._count()
        values: dict[str, object] = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._integer("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(str(self._path), "has a damaged header", REMEDY)
        base = -(-self._at // alignment) * alignment
        return GGUFHeader(values=MappingProxyType(values), tensors=tuple(self._placed(base, *info) for info in infos))

    def _scalars(self, code: str, count: int) -> list[object]:
        layout = f"<{count}{code}"
        numbers = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return list(numbers)

    def _integer(self, code: str) -> int:
        [number] = self._scalars(code, 1)
        assert isinstance(number, int)
        return number

    def _count(self) -> int:
        """A number of things, each of at least one byte: more than the file is long is damage, not memory to fill."""
        count = self._integer("Q")
        if count > len(self._content):
            raise ModelFileError(str(self._path), "has a damaged header", REMEDY)
        return count

    def _string(self) -> str:
        size = self._count()
        end = self._at + size
        if end > len(self._content):
            raise IndexError
        text = bytes(self._content[self._at : end]).decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._integer("I"), self._count()
            if item in _SCALARS:
                return self._scalars(_SCALARS[item], count)
            read: Callable[[], object] = self._string if item == _STRING else lambda: self._value(item)
            return [read() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelFileError(str(self._path), f"has metadata of an unknown type ({kind})", REMEDY)
        return self._scalars(_SCALARS[kind], 1)[0]

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dimensions = self._integer("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ModelFileError(str(self._path), "has a damaged header", REMEDY)
        shape = tuple(reversed([self._integer("Q") for _ in range(num_dimensions)]))
        return name, self._integer("I"), shape, self._integer("Q")

    def _placed(self, base: int, name: str, kind: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ModelFileError(
                str(self._path), f"stores '{name}' in an unknown format ({kind})", "use another quantisation"
            ) from None
        block_items, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        num_items = 1
        for extent in shape:
            num_items *= extent
        num_bytes = num_items // block_items * block_bytes
        if num_items == 0:
            raise ModelFileError(str(self._path), f"has no values for tensor '{name}'", REMEDY)
        if num_items % block_items or base + offset + num_bytes > len(self._content):
            raise ModelFileError(str(self._path), f"ends before tensor '{name}' does (truncated)", REMEDY)
        return TensorInfo(name=name, kind=quantisation, shape=shape, offset=base + offset, num_bytes=num_bytes)
