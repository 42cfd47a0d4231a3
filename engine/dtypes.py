"""Which arithmetic and which KV memory ``auto`` means on a device, and what may be combined."""

from core.errors import ConfigError
from engine.device import Device

COMPUTE_DTYPES = {
    Device.CPU: ("float32", "bfloat16", "int8"),
    Device.CUDA: ("bfloat16", "float16", "float32"),
    Device.INTERPRETER: ("float32", "float16"),
}
"""The first one is what ``auto`` means. The interpreter computes with bfloat16's raw bits: wrong."""
_CPU_KV = {
    "float32": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "float32"),
    "int8": ("bfloat16", "float32"),
}
"""Of KV, by compute dtype: the first one is what ``auto`` means. Elsewhere KV has the compute dtype."""
QUANTISATIONS = {"int8": "w8a8-row"}
"""Of weights and inputs: integers with a scale for each row."""


def resolve_dtypes(dtype: str, kv_dtype: str, device: Device = Device.CPU) -> tuple[str, str]:
    """``(compute, KV)`` without ``auto``. Raises :class:`ConfigError`."""
    compute = _resolve("dtype", dtype, COMPUTE_DTYPES[device], device)
    kv_dtypes = (compute,) if device.has_triton else _CPU_KV[compute]
    return compute, _resolve("kv.dtype", kv_dtype, kv_dtypes, device)


def _resolve(name: str, dtype: str, supported: tuple[str, ...], device: Device) -> str:
    if dtype == "auto":
        return supported[0]
    if dtype not in supported:
        raise ConfigError(f"models[].{name} is {dtype}: on {device.label} say auto, {', '.join(supported)}")
    return dtype


def quantisation_of(dtype: str) -> str:
    return QUANTISATIONS.get(dtype, "none")
