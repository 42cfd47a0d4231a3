"""An orthogonal change of basis for the residual stream, so that no channel towers over the others.

Trained models keep a few channels of the residual stream tens of times larger than the rest; a row with one scale for
all its integers then loses the rest. In a rotated basis every channel carries a part of them. Since RMS norms without
their gain commute with rotations, the rotation is folded into the weights once and costs nothing afterwards (QuaRot,
arXiv 2404.00456): the embedding and everything that writes to the stream rotate, everything that reads it rotates
back. For that the gain must be in the reading weight, and nothing may be normed on its way to the stream.
"""

import math

import torch
from torch import Tensor


def rotation(size: int) -> Tensor:
    """``[size, size]``: random signs, then Hadamard (of the largest power of two in ``size``) x cosine transform."""
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    power = size & -size
    return (signs * torch.kron(_hadamard(power), _cosines(size // power))).float()


def _hadamard(size: int) -> Tensor:
    """Sylvester's, normalised."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / math.sqrt(2)
    return matrix


def _cosines(size: int) -> Tensor:
    """The orthonormal cosine transform (DCT-II)."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (index[:, None] + 0.5) * index) * math.sqrt(2 / size)
    matrix[:, 0] /= math.sqrt(2)
    return matrix
