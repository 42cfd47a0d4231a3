"""Compiles every GPU kernel without a GPU: ``python -m engine.kernels.gpu.ahead [--target sm_90] [--json FILE]`` prints
what each one takes of a multiprocessor.

The variants are those of a Qwen3-8B in bfloat16 and of what differs most from it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGETS = ("sm_80", "sm_90")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with its types and constants. ``pointers`` give dtypes by argument; other arguments are int32, but
    for ``floats``."""

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    constants: Mapping[str, Any]
    floats: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of one program: registers of a thread, bytes spilled by a thread, bytes of shared memory."""

    name: str
    kernel: str
    target: str
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def variants() -> Iterator[Variant]:
    """Every kernel at least once."""
    from engine.kernels.gpu import (
        activation,
        advance,
        attention,
        decode_attention,
        digest,
        linear,
        norm,
        rotary,
        sampling,
        shaping,
    )
    from engine.kernels.gpu.launch import power_of_two

    half = "bf16"
    for adds in (False, True):
        yield Variant(
            name=f"rms_norm{'+residual' if adds else ''}",
            kernel=norm._rms_norm,
            pointers=dict.fromkeys(("x", "residual", "gain", "out"), half),
            constants={"BLOCK": 4096, "ADDS": adds},
            floats=("eps",),
            num_warps=8,
        )
    for is_silu in (True, False):
        yield Variant(
            name="gated silu" if is_silu else "gated gelu",
            kernel=activation._gated,
            pointers={"gate_up": half, "out": half},
            constants={"BLOCK": activation.COLUMNS, "IS_SILU": is_silu},
        )
    for has_norm in (True, False):
        yield Variant(
            name=f"append{'+norm' if has_norm else ''}",
            kernel=rotary._append,
            pointers={
                "qkv": half,
                "gains": half if has_norm else "fp32",
                "cos": "fp32",
                "sin": "fp32",
                "positions": "i32",
                "slots": "i64",
                "kv": half,
            },
            constants={
                "BLOCK_SIZE": 16,
                "NUM_QUERY_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "HEAD_DIM": 128,
                "HALF": 64,
                "HAS_NORM": has_norm,
            },
            floats=("eps",),
            num_warps=1,
        )
    for group, head_dim, window in ((4, 128, 0), (3, 64, 0), (4, 256, 512), (8, 96, 0)):
        tiles = attention.tiles_for(group, head_dim)
        shared = {
            "WINDOW": window,
            "BLOCK_SIZE": 16,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "COLUMNS": power_of_two(head_dim),
            "KEYS": tiles.keys,
        }
        label = f"group {group} head_dim {head_dim} window {window}"
        ints = dict.fromkeys(("tables", "contexts", "query_starts"), "i32")
        yield Variant(
            name=f"attend {label}",
            kernel=attention._attend,
            pointers={"q": half, "kv": half, "out": half, **ints},
            constants={**shared, "TOKENS": tiles.rows // group, "ROWS": tiles.rows},
            floats=("scale",),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        for num_splits in (1, 16):
            yield Variant(
                name=f"attend_decode {label} splits {num_splits}",
                kernel=decode_attention._attend_split,
                pointers={"q": half, "kv": half, "out": half, "values": "fp32", "logs": "fp32", **ints},
                constants={**shared, "ROWS": 16, "NUM_SPLITS": num_splits},
                floats=("scale",),
                num_stages=3,
            )
    yield Variant(
        name="join",
        kernel=decode_attention._join,
        pointers={"values": "fp32", "logs": "fp32", "out": half, "contexts": "i32"},
        constants={"WINDOW": 0, "HEAD_DIM": 128, "COLUMNS": 128, "KEYS": 64, "NUM_SPLITS": 16, "SPLITS": 16},
        num_warps=2,
    )
    for adds in (False, True):
        yield Variant(
            name=f"linear{'+residual' if adds else ''}",
            kernel=linear._linear,
            pointers=dict.fromkeys(("x", "weight", "bias", "out"), half),
            constants={
                "HAS_BIAS": False,
                "ADDS": adds,
                "ROWS": linear.ROWS,
                "OUTPUTS": linear.OUTPUTS,
                "INPUTS": linear.INPUTS,
            },
            num_stages=4,
        )
    yield Variant(
        name="advance",
        kernel=advance._advance,
        pointers={
            **dict.fromkeys(("tokens", "prefixes", "ids", "slots", "keys"), "i64"),
            **dict.fromkeys(("nexts", "tables", "positions", "contexts"), "i32"),
        },
        constants={"BLOCK_SIZE": 16},
        num_warps=1,
    )
    yield Variant(
        name="wsum64",
        kernel=digest._wsum64,
        pointers={"words": "i64", "blocks": "i32", "out": "i64"},
        constants={"BLOCK": digest.WORDS},
    )
    options = dict.fromkeys(("temperatures", "top_ps", "min_ps"), "fp32")
    yield Variant(
        name="choose",
        kernel=sampling._choose,
        pointers={"scores": "fp32", **options, "top_ks": "i32", "keys": "i64", "out": "i32"},
        constants={"BLOCK": sampling.TOKENS},
        num_warps=8,
    )
    yield Variant(
        name="forbid",
        kernel=shaping._forbid,
        pointers={"scores": "fp32", "allowed": "i32", "is_masked": "i32"},
        constants={"BLOCK": shaping.TOKENS},
    )
    penalties = dict.fromkeys(("scores", "repetition", "frequency", "presence"), "fp32")
    yield Variant(
        name="penalise",
        kernel=shaping._penalise,
        pointers={**penalties, "counts": "i32", "places": "i64"},
        constants={"BLOCK": shaping.TOKENS},
    )


def compile_variant(variant: Variant, target: str, folder: Path) -> Resources:
    """Compile for ``sm_NN``, down to machine code. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability = int(target.removeprefix("sm_"))
    constants = {**variant.constants, "CHAINED": capability >= 90}
    signature = {
        name: "constexpr"
        if name in constants
        else f"*{variant.pointers[name]}"
        if name in variant.pointers
        else "fp32"
        if name in variant.floats
        else "i32"
        for name in variant.kernel.arg_names
    }
    # As at a launch: Triton tells apart what is a multiple of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, name in enumerate(signature)
        if name in variant.pointers or name.endswith(("_stride", "_offset", "_inputs"))
    }
    strangers = (constants.keys() | variant.pointers.keys() | {*variant.floats}) - {*signature} - {"query_starts"}
    assert not strangers, f"{variant.name} has no {strangers}"
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "launch_pdl": capability >= 90}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    registers, stack, _ = map(int, _found(_dump(path)))
    return Resources(
        name=variant.name,
        kernel=variant.kernel.__name__,
        target=target,
        num_warps=variant.num_warps,
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=compiled.metadata.shared,
    )


def _dump(path: Path) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _found(text: str) -> tuple[str, ...]:
    match = _RESOURCES.search(text)
    if match is None:
        raise ValueError(f"cuobjdump did not say what the kernel takes: {text[:200]}")
    return match.groups()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.gpu.ahead", description="compile the GPU kernels")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all of them")
    parser.add_argument("--brief", action="store_true", help="one variant of each kernel")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    from triton import knobs

    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: kernels are interpreted, not compiled; run without it", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as folder:
        knobs.cache.dir = folder
        for target in options.target or TARGETS:
            print(f"{target:44} warps  registers  spilled B  shared B")
            chosen = list(variants())
            if options.brief:
                chosen = list({variant.kernel.__name__: variant for variant in reversed(chosen)}.values())
            for variant in chosen:
                row = compile_variant(variant, target, Path(folder))
                rows.append(row)
                numbers = f"{row.num_warps:5}  {row.registers:9}  {row.spilled_bytes:9}  {row.shared_bytes:8}"
                print(f"  {row.name:42} {numbers}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
