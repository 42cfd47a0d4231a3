"""Reads a model's weights out of its files, or says in one line which tensor of which file is wrong."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError
from modelfiles.families import FAMILIES, family_of
from modelfiles.model import ModelFiles

NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Endings of tensors that some files hold and nobody needs."""


class Weights(Protocol):
    """Where a decoder's tensors come from, by Hugging Face name."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, the caller's to keep and to change."""

    def fused(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several projections of one input as one: ``parts`` maps module names to their number of
        outputs."""

    def check_all_read(self, *unused: str) -> None:
        """Raises for a tensor, but for ``unused``, that nobody asked for."""


class WeightReader:
    """Tensors of one model by Hugging Face name, as float32. Remembers which were read."""

    def __init__(self, files: ModelFiles) -> None:
        family_of(files.config.architecture, FAMILIES, files.path)
        self._files = files
        self._names = frozenset(files.tensor_names())
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises :class:`ConfigError` when it is missing or has another shape than its config demands."""
        if name not in self._names:
            raise ConfigError(f"{self._files.file_of(name)}: tensor '{name}' is missing; use a complete model")
        array = self._files.load_tensor(name)
        if array.shape != shape:
            raise ConfigError(
                f"{self._files.file_of(name)}: tensor '{name}' has shape {tuple(array.shape)}, its config says "
                f"{shape}; use weights and config of the same model"
            )
        self._read.add(name)
        # A copy: the array may be a read-only view of the file, which must not stay mapped.
        return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))

    def fused(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several projections of one input as one: ``parts`` maps module names to their number of
        outputs. A bias is read where the files have one; with ``has_bias`` all of them must.
        """
        weight = torch.cat([self.tensor(f"{name}.weight", size, num_inputs) for name, size in parts.items()])
        if not has_bias and not any(self.has(f"{name}.bias") for name in parts):
            return weight, None
        return weight, torch.cat([self.tensor(f"{name}.bias", size) for name, size in parts.items()])

    def check_all_read(self, *unused: str) -> None:
        """Raises for a tensor that the architecture has no place for: ignoring it would give wrong answers."""
        for name in sorted(self._names - self._read - {*unused}):
            if not name.endswith(NO_WEIGHTS):
                raise ConfigError(
                    f"{self._files.file_of(name)}: tensor '{name}' has no place in a {self._files.config.architecture} "
                    "decoder; use a model of a supported architecture"
                )
