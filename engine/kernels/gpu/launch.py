"""What every GPU kernel shares: how it is compiled and started, and the checks of its arguments.

Kernels are written in Triton and run on NVIDIA GPUs from sm_80 on, or, with ``TRITON_INTERPRET=1`` set before they are
imported, in Triton's interpreter on CPU tensors (float32 and float16 only).
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRETING = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """For whoever runs kernels beside others: the interpreter replaces Triton's functions for everybody meanwhile. On a
    device nobody waits."""
    return _INTERPRETING if triton.knobs.runtime.interpret else nullcontext()


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function that kernels call."""
    return triton.jit(function)


def power_of_two(number: int) -> int:
    """The least one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def is_chained(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device may be launched before the one ahead of them has ended."""
    return tensor.is_cuda and _has_programmatic_launch(tensor.device.index)


@cache
def _has_programmatic_launch(device: int) -> bool:
    """Programmatic dependent launch: from Hopper (sm_90) on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(tensor: Tensor, *, num_warps: int, num_stages: int = 2) -> dict[str, Any]:
    """Launch options. ``CHAINED`` goes to the kernel: it waits for its inputs by itself (:func:`wait`)."""
    chained = is_chained(tensor)
    launch = {"num_warps": num_warps, "num_stages": num_stages, "CHAINED": chained}
    return {**launch, "launch_pdl": True} if chained else launch


@jit
def wait(CHAINED: tl.constexpr):
    """Until what the kernels ahead wrote can be read. Whatever they do not write may be loaded before."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@jit
def go_ahead(CHAINED: tl.constexpr):
    """The next kernel may start and load what this one does not write."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


def check(tensor: Tensor, name: str, *shape: int | None, dtype: torch.dtype | None = None) -> None:
    """``None`` is any size. The last dimension must be dense: kernels step through it element by element."""
    problem = ""
    if tensor.dim() != len(shape) or any(w is not None and h != w for h, w in zip(tensor.shape, shape, strict=True)):
        problem = f"has shape {tuple(tensor.shape)}, wanted {shape}"
    elif dtype is not None and tensor.dtype != dtype:
        problem = f"is {tensor.dtype}, wanted {dtype}"
    elif tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        problem = f"has stride {tensor.stride(-1)} in its last dimension, wanted 1"
    if problem:
        raise ValueError(f"{name} {problem}")
