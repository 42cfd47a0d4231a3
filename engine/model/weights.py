"""Reads a model's weights out of its files, or says in one line which tensor of which file is wrong."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError
from modelfiles.config import SUPPORTED_ARCHITECTURES
from modelfiles.model import ModelFiles


class WeightReader:
    """Tensors of one model by Hugging Face name, as float32."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._names = frozenset(files.tensor_names())
        if files.config.architecture not in SUPPORTED_ARCHITECTURES:
            raise ConfigError(
                f"{files.path}: architecture {files.config.architecture!r} is not supported; "
                f"use one of: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises :class:`ConfigError` when it is missing or has another shape than its config demands."""
        if name not in self._names:
            raise ConfigError(f"{self._files.path}: tensor {name!r} is missing; use a complete model file")
        array = self._files.load_tensor(name)
        if array.shape != shape:
            raise ConfigError(
                f"{self._files.path}: tensor {name!r} has shape {tuple(array.shape)}, its config says {shape}; "
                "use weights and config of the same model"
            )
        # A copy: the array may be a read-only view of the file, which must not stay mapped.
        return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))

    def fused(self, parts: Mapping[str, int], num_inputs: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several projections of one input as one: ``parts`` maps module names to their number of
        outputs.
        """
        weight = torch.cat([self.tensor(f"{name}.weight", size, num_inputs) for name, size in parts.items()])
        bias = None
        if any(self.has(f"{name}.bias") for name in parts):
            bias = torch.cat(
                [
                    self.tensor(f"{name}.bias", size) if self.has(f"{name}.bias") else torch.zeros(size)
                    for name, size in parts.items()
                ]
            )
        return weight, bias
