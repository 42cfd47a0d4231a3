"""Rotary position tables, by halves as Hugging Face has it: ``rotate([a, b]) = [a cos - b sin, b cos + a sin]``.

Frequencies: RoFormer (arXiv 2104.09864); ``linear`` divides positions; ``llama3`` stretches low frequencies (Llama
3.1, as in transformers' ``_compute_llama3_parameters``).
"""

import math

import torch
from torch import Tensor

from modelfiles.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, max_context: int) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` of every position, ``[position, 1, head_dim]`` in float32.

    The sign of the rotation is in ``sin``: its first half is negative. So rotating is ``x cos + swap_halves(x) sin``.
    """
    inverse_D = _inverse_frequencies(config)
    angles = torch.arange(max_context, dtype=torch.float32)[:, None] * inverse_D[None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate each head of each token to its position."""
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.shape[-1] // 2, -1), sin_T1D)


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    return _llama3(inverse, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / inverse
    longest_kept = scaling.original_max_context / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_context / scaling.low_freq_factor
    smooth = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = inverse / scaling.factor
    between = (1 - smooth) * stretched + smooth * inverse
    result = torch.where(wavelength > shortest_stretched, stretched, between)
    return torch.where(wavelength < longest_kept, inverse, result)
