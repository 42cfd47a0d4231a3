"""What one step of answers launches, reads and writes, kernel by kernel, beside the floor of the weights:
``python -m bench.on_gpu.budget [--rows N] [--context N] [--resources FILE]``.

Computed from the model's shape, not measured. With the file that ``python -m engine.kernels.gpu.ahead --json FILE``
wrote, also what each kernel takes of a multiprocessor. Both tables are Markdown; ``docs/gpu.md`` has them.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.kernels.gpu.decode_attention import MIN_TILES, splits_for

BYTES_PER_S = 4.3e12
"""Of the reference device; every figure of ``us`` is bytes over this."""
LAUNCH_US = 1.3
"""From one kernel of a graph to the next where they are not chained, and a microsecond less where they are."""
HALF, WORD = 2, 4
NUM_PROCESSORS = 132
KEYS = 64
"""Of a tile, with this head_dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a decoder; Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 12288
    vocabulary: int = 151936

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel of a step. Bytes of one launch."""

    name: str
    times: int
    read: int
    written: int
    weights: int = 0
    """Of ``read``."""


def launches(shape: Shape, rows: int, context: int) -> list[Launch]:
    """In their order."""
    num_splits = splits_for(rows, shape.kv_heads, NUM_PROCESSORS)
    num_tiles = -(-context // KEYS)
    used = -(-num_tiles // max(MIN_TILES, -(-num_tiles // num_splits))) if num_splits > 1 else 1
    layers = shape.layers
    hidden, wide = rows * shape.hidden * HALF, rows * (shape.q + 2 * shape.kv) * HALF
    queries = rows * shape.q * HALF
    keys = 2 * rows * context * shape.kv * HALF
    parts = rows * shape.heads * used * (shape.head_dim + 1) * WORD if used > 1 else 0
    scores = rows * shape.vocabulary

    def product(name: str, times: int, inputs: int, outputs: int, *, adds: bool = False) -> Launch:
        into = rows * outputs * HALF
        return Launch(
            name=name,
            times=times,
            read=inputs * outputs * HALF + rows * inputs * HALF + (into if adds else 0),
            written=into,
            weights=inputs * outputs * HALF,
        )

    norm = Launch(name="rms_norm", times=2 * layers + 1, read=hidden + shape.hidden * HALF, written=hidden)
    found = [
        Launch(name="advance", times=1, read=rows * 24, written=rows * 40),
        Launch(name="embedding (torch)", times=1, read=hidden, written=hidden),
        norm,
        product("q, k, v (cuBLAS)", layers, shape.hidden, shape.q + 2 * shape.kv),
        Launch(
            name="append",
            times=layers,
            read=wide + rows * 2 * shape.head_dim * WORD,
            written=queries + 2 * rows * shape.kv * HALF,
        ),
        Launch(name="attend_split", times=layers, read=queries + keys, written=parts or queries),
    ]
    if num_splits > 1:
        found.append(Launch(name="join", times=layers, read=parts, written=queries if parts else 0))
    return [
        *found,
        product("output + residual (cuBLAS)", layers, shape.q, shape.hidden, adds=True),
        product("gate, up (cuBLAS)", layers, shape.hidden, 2 * shape.inner),
        Launch(name="gated", times=layers, read=rows * 2 * shape.inner * HALF, written=rows * shape.inner * HALF),
        product("down + residual (cuBLAS)", layers, shape.inner, shape.hidden, adds=True),
        product("head (cuBLAS)", 1, shape.hidden, shape.vocabulary),
        Launch(name="scores to float32 (torch)", times=1, read=scores * HALF, written=scores * WORD),
        Launch(name="choose, greedy", times=1, read=scores * WORD, written=rows * 8),
    ]


def step_table(shape: Shape, rows: int, context: int) -> list[str]:
    found = launches(shape, rows, context)
    lines = [
        f"{rows} rows at context {context}:",
        "",
        "| kernel | launches | read, MB | written, MB | us at 4.3 TB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in found:
        read, written = each.times * each.read / 1e6, each.times * each.written / 1e6
        time_us = (read + written) * 1e12 / BYTES_PER_S
        lines.append(f"| {each.name} | {each.times} | {read:.3f} | {written:.3f} | {time_us:.1f} |")
    total = sum(each.times * (each.read + each.written) for each in found)
    weights = sum(each.times * each.weights for each in found)
    kv = 2 * shape.layers * rows * context * shape.kv * HALF
    num_launches = sum(each.times for each in found)
    others = total - weights - kv
    chained = (num_launches - sum(each.times for each in found if "(" in each.name)) * (LAUNCH_US - 1.0)
    unchained = sum(each.times for each in found if "(" in each.name) * LAUNCH_US
    floor_us = (weights + kv) * 1e6 / BYTES_PER_S
    return [
        *lines,
        f"| **sum** | {num_launches} | | {total / 1e6:.0f} in all | {total * 1e6 / BYTES_PER_S:.0f} |",
        "",
        f"Weights {weights / 1e9:.2f} GB and KV {kv / 1e9:.3f} GB: a floor of {floor_us / 1e3:.2f} ms. Everything else "
        f"is {others / 1e6:.1f} MB ({100 * others / total:.2f} %) and {num_launches} launches, whose gaps are about "
        f"{(chained + unchained) / 1e3:.2f} ms ({100 * (chained + unchained) / floor_us:.0f} % of the floor).",
    ]


def resource_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| kernel | target | warps | registers | spilled, B | shared, B | programs of a multiprocessor |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shared = 227 * 1024 if row["target"] == "sm_90" else 163 * 1024
        threads = 32 * row["num_warps"]
        by_registers = 65536 // (threads * -(-row["registers"] // 8) * 8)
        fits = min(by_registers, 2048 // threads, shared // max(1, row["shared_bytes"]), 32)
        lines.append(
            f"| {row['name']} | {row['target']} | {row['num_warps']} | {row['registers']} | {row['spilled_bytes']} "
            f"| {row['shared_bytes']} | {fits} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.on_gpu.budget", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--resources", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    print("\n".join(step_table(Shape(), options.rows, options.context)))
    if options.resources is not None:
        print("\n" + "\n".join(resource_table(json.loads(options.resources.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
