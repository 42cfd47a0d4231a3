"""Where an engine computes: on one CPU core, on an NVIDIA GPU, or, for tests, with the GPU's kernels on a CPU."""

from enum import StrEnum

import torch

from core.errors import ConfigError


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    INTERPRETER = "interpreter"
    """The GPU's kernels, interpreted: thousands of times slower. Needs TRITON_INTERPRET=1 when they are imported."""

    @property
    def torch(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self is Device.CUDA else torch.device("cpu")

    @property
    def label(self) -> str:
        """As messages name it."""
        return {Device.CPU: "CPU", Device.CUDA: "a GPU", Device.INTERPRETER: "the interpreter"}[self]

    @property
    def has_triton(self) -> bool:
        """Whether the kernels of :mod:`engine.kernels.gpu` run there."""
        return self is not Device.CPU


def resolve_device(asked: str) -> Device:
    """Raises :class:`ConfigError` for one that is not here."""
    device = Device(asked)
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError("the device is cuda, but torch sees no GPU here: set it to cpu")
    if device is Device.INTERPRETER:
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ConfigError(
                "the device is interpreter, but Triton would compile: set TRITON_INTERPRET=1 before the start"
            )
    return device
