"""Where weights come from: a source of named arrays in Hugging Face's names and layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096

Array = npt.NDArray[np.floating]


class TensorSource(Protocol):
    """Tensors of one model. `load` may be called from any thread; the array it returns may be read-only."""

    def names(self) -> tuple[str, ...]: ...

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor; the model's path when none does."""

    def load(self, name: str) -> Array: ...


def sampled_digest(facts: str, files: tuple[Path, ...]) -> str:
    """Digest of a model's content, cheap enough for every start.

    Covers `facts` (the parsed config), the size of each file, its head (which holds the tensor index) and 64 pages
    spread evenly over it. Paths and names are left out: a copy of a model is the same model.
    """
    digest = hashlib.sha256(facts.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(64 * 1024))
            for index in range(NUM_SAMPLES):
                file.seek(max(0, (size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1)))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
