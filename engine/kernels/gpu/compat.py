"""What the device and the Triton at hand can do."""

from functools import cache

import torch


@cache
def has_programmatic_launch(device: int) -> bool:
    """Programmatic dependent launch: from Hopper (sm_90) on."""
    return torch.cuda.get_device_capability(device)[0] >= 9
