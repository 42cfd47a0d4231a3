"""Which arithmetic and which KV memory ``auto`` means, and what may be combined."""

from core.errors import ConfigError

COMPUTE_DTYPES = ("float32", "bfloat16", "int8")
KV_DTYPES = ("float32", "bfloat16")
AUTO_COMPUTE_DTYPE = "float32"
AUTO_KV_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}
"""By compute dtype."""
QUANTISATIONS = {"int8": "w8a8-row"}
"""Of weights and inputs: integers with a scale for each row."""


def resolve_dtypes(dtype: str, kv_dtype: str) -> tuple[str, str]:
    """``(compute, KV)`` without ``auto``. Raises :class:`ConfigError`."""
    compute = _resolve("dtype", dtype, AUTO_COMPUTE_DTYPE, COMPUTE_DTYPES)
    return compute, _resolve("kv.dtype", kv_dtype, AUTO_KV_DTYPES[compute], KV_DTYPES)


def _resolve(name: str, dtype: str, auto: str, supported: tuple[str, ...]) -> str:
    if dtype == "auto":
        return auto
    if dtype not in supported:
        raise ConfigError(f"models[].{name} is {dtype}: on CPU say auto, {', '.join(supported)}")
    return dtype


def quantisation_of(dtype: str) -> str:
    return QUANTISATIONS.get(dtype, "none")
