"""Where kernels for a GPU run in tests: on one, or in Triton's interpreter."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32, torch.float16)
"""The interpreter computes with bfloat16's raw bits: wrong."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
