"""Vector code for one CPU core, written as LLVM IR: what a compiler does not find by itself in a loop.

Addresses are integers; nothing here checks a bound. Vectors have :func:`lanes` floats; LLVM splits them where the
processor's are narrower. Every sum has one order that is written down here: that is what law 3 rests on.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

KEYS = 16
"""Keys of one tile: what the two products of attention take at a time."""
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be cut into lanes and products fused; NaN and infinity keep their meaning."""
MAX_LANES = 16
SUMS = 16
"""Vectors that are added up at the same time."""
CACHE_LINE = 64

_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)


def keep_compiled_code(folder: Path) -> bool:
    """Choose where numba keeps it: below ``folder``, which holds the kernels' sources. False where nothing can be
    written: an image's files may belong to another user.

    By itself numba compares a function's own file only; code that is built into it from another file could be out of
    date, so the place carries a digest of all kernels.
    """
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    kept = folder / "__pycache__" / f"compiled-{digest.hexdigest()[:16]}"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    if not os.access(kept, os.W_OK | os.X_OK):
        return False
    numba.config.CACHE_DIR = str(kept)
    return True


_IS_KEPT = keep_compiled_code(Path(__file__).parent)


def jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call, without bounds checks; the code runs without holding Python's lock.

    It is kept beside the source where that can be written. Elsewhere each process compiles for itself: seconds.
    """
    return numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy", boundscheck=False, cache=_IS_KEPT)(function)


def lanes(size: int) -> int:
    """Floats of a vector that divides ``size``."""
    return min(MAX_LANES, size & -size)


@intrinsic
def float_of(_: Any, bits: Any) -> Any:
    """The float32 whose bits an int32 holds."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def bits_of(_: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


def _pointer(builder: ir.IRBuilder, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _load(builder: ir.IRBuilder, pointer: Any, index: int, width: int) -> Any:
    """``width`` elements from ``pointer[index]``; no alignment is promised."""
    element = pointer.type.pointee
    at = builder.gep(pointer, [_I32(index)])
    vector = ir.VectorType(element, width)
    size = 2 if element == ir.IntType(16) else 4
    return builder.load(builder.bitcast(at, vector.as_pointer()), align=size)


def _store(builder: ir.IRBuilder, value: Any, pointer: Any, index: int) -> None:
    at = builder.gep(pointer, [_I32(index)])
    builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=4)


def _fused(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """``a b + c``, rounded once."""
    name = f"llvm.fma.v{c.type.count}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(c.type, [c.type] * 3), name)
    return builder.call(function, [a, b, c])


def _splat(builder: ir.IRBuilder, scalar: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(_FLOAT, width), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, _mask([0] * width))


def _mask(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def _sum_each(builder: ir.IRBuilder, rows: list[Any]) -> Any:
    """From W vectors of W lanes one vector: lane i is the sum of vector i, halves first.

    Each stage adds the halves of two vectors at once, so W sums take W - 1 additions of whole vectors. Every vector
    goes through the same additions whatever its place.
    """
    width = len(rows)
    # After s stages a vector holds 2^s rows, each in a run of W / 2^s lanes.
    run = width
    while len(rows) > 1:
        half = run // 2
        low = [lane for start in range(0, 2 * width, run) for lane in range(start, start + half)]
        high = [lane + half for lane in low]
        pairs = [(rows[i], rows[i + len(rows) // 2]) for i in range(len(rows) // 2)]
        rows = [
            builder.fadd(builder.shuffle_vector(a, b, _mask(low)), builder.shuffle_vector(a, b, _mask(high)))
            for a, b in pairs
        ]
        run = half
    return rows[0]


def _place_of_sums(width: int) -> list[int]:
    """Where each vector must stand in the argument of :func:`_sum_each`, so that lane i is the sum of vector i."""
    groups = [[index] for index in range(width)]
    while len(groups) > 1:
        half = len(groups) // 2
        groups = [groups[i] + groups[i + half] for i in range(half)]
    return groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """What attention does with one tile of :data:`KEYS` keys or values, for heads of one size. Compiled code takes
    these fields as functions; all arguments are addresses.

    ``fetch(source, target, ahead)``: one key or value of the cache as float32; ``ahead`` is asked into the cache.
    ``score(q, keys, out)``: ``out[j] = sum_d q[d] keys[j, d]``.
    ``weigh(weights, values, out)``: ``out[d] += sum_j weights[j] values[j, d]``, from the first key to the last.
    """

    fetch: Any
    score: Any
    weigh: Any


def make_products(size: int, *, is_half: bool) -> Products:
    """For heads of ``size`` numbers; ``is_half``: the cache holds bfloat16."""
    width = lanes(size)
    places = _place_of_sums(width)
    element = ir.IntType(16) if is_half else _FLOAT

    @intrinsic
    def fetch(_: Any, source: Any, target: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            from_at, to_at = _pointer(builder, arguments[0], element), _pointer(builder, arguments[1], _FLOAT)
            for first in range(0, size, CACHE_LINE // (2 if is_half else 4)):
                _prefetch(builder, _pointer(builder, arguments[2], element), first)
            for first in range(0, size, width):
                numbers = _load(builder, from_at, first, width)
                if is_half:
                    wide = builder.zext(numbers, ir.VectorType(_I32, width))
                    shift = ir.Constant(wide.type, [16] * width)
                    numbers = builder.bitcast(builder.shl(wide, shift), ir.VectorType(_FLOAT, width))
                _store(builder, numbers, to_at, first)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    @intrinsic
    def score(_: Any, q: Any, keys: Any, out: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            q_at, keys_at, out_at = (_pointer(builder, address, _FLOAT) for address in arguments)
            parts = [_load(builder, q_at, first, width) for first in range(0, size, width)]
            for group in range(0, KEYS, width):
                products: list[Any] = [None] * width
                for key in range(width):
                    row = (group + key) * size
                    total = builder.fmul(parts[0], _load(builder, keys_at, row, width))
                    for index, part in enumerate(parts[1:], 1):
                        total = _fused(builder, part, _load(builder, keys_at, row + index * width, width), total)
                    products[places[key]] = total
                _store(builder, _sum_each(builder, products), out_at, group)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    @intrinsic
    def weigh(_: Any, weights: Any, values: Any, out: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            weights_at, values_at, out_at = (_pointer(builder, address, _FLOAT) for address in arguments)
            # So many sums at a time as the registers hold.
            for start in range(0, size, SUMS * width):
                firsts = range(start, min(size, start + SUMS * width), width)
                totals = [_load(builder, out_at, first, width) for first in firsts]
                for key in range(KEYS):
                    weight = _splat(builder, builder.load(builder.gep(weights_at, [_I32(key)])), width)
                    totals = [
                        _fused(builder, weight, _load(builder, values_at, key * size + first, width), total)
                        for first, total in zip(firsts, totals, strict=True)
                    ]
                for first, total in zip(firsts, totals, strict=True):
                    _store(builder, total, out_at, first)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return Products(fetch=fetch, score=score, weigh=weigh)


def _prefetch(builder: ir.IRBuilder, pointer: Any, index: int) -> None:
    at = builder.bitcast(builder.gep(pointer, [_I32(index)]), ir.IntType(8).as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [at.type, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], signature)
    builder.call(function, [at, _I32(0), _I32(3), _I32(1)])
