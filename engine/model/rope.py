"""Rotary position tables, by halves as Hugging Face has it: ``rotate([a, b]) = [a cos - b sin, b cos + a sin]``.

Frequencies: RoFormer (arXiv 2104.09864); ``linear`` divides positions; ``llama3`` stretches low frequencies (Llama
3.1); ``yarn`` stretches by a ramp over the frequencies and scales cos and sin (arXiv 2309.00071); ``factors`` divides
each frequency by its own number. All as in transformers' ``modeling_rope_utils``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelfiles.config import RopeScaling


@dataclass(frozen=True, slots=True)
class RopeTables:
    """``cos`` and ``sin`` of every position, ``[position, head_dim]`` in float32, on the model's device.

    The sign of the rotation is in ``sin``: its first half is negative. So rotating is ``x cos + swap_halves(x) sin``.
    """

    cos: Tensor
    sin: Tensor


def rope_tables(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    max_context: int,
    device: torch.device | str = "cpu",
) -> RopeTables:
    inverse_D = _inverse_frequencies(head_dim, theta, scaling)
    angles = torch.arange(max_context, dtype=torch.float32)[:, None] * inverse_D[None, :]
    factor = 1.0 if scaling is None else scaling.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return RopeTables(torch.cat([cos, cos], -1).to(device), torch.cat([-sin, sin], -1).to(device))


def _inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (theta**exponents)
    if scaling is None:
        return inverse
    match scaling.kind:
        case "linear":
            return inverse / scaling.factor
        case "llama3":
            return _llama3(inverse, scaling)
        case "yarn":
            return _yarn(inverse, head_dim, theta, scaling)
        case "factors":
            return inverse / torch.tensor(scaling.factors)


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


def _yarn(inverse: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Dimensions that turn often within the original context stay as they are, those that turn seldom are stretched."""

    def dimension_of(num_turns: float) -> float:
        return head_dim * math.log(scaling.original_max_context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, so that the ramp has a slope
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return inverse / scaling.factor * (1 - kept) + inverse * kept
