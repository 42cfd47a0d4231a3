"""The products of one layer and the head, by rows: cuBLAS, and our kernel whose tiles have one size, as shares of the
memory's rate. What a choice between several ways to multiply is to be made of.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.on_gpu.setup import Setup, measure_rates
from engine.kernels.gpu.linear import linear

_COLD_BYTES = 512 << 20
"""So many bytes of weights in turn: none of them is in a cache when it is wanted."""


def products(setup: Setup) -> dict[str, Any]:
    """``gbps``: bytes of weights, inputs and outputs over time."""
    rates = measure_rates(setup)
    config = setup.config
    shapes = {
        "q, k, v": (config.hidden_size, config.q_size + 2 * config.kv_size),
        "output": (config.q_size, config.hidden_size),
        "gate, up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
        "head": (config.hidden_size, config.vocab_size),
    }
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cublas": F.linear, "triton": _by_tiles}
    rows: list[dict[str, Any]] = []
    for name, (inputs, outputs) in shapes.items():
        for num_rows in (1, 8, 64) if setup.is_gpu else (1, 3):
            for way, product in ways.items():
                seconds = _time(setup, product, num_rows, inputs, outputs)
                num_bytes = (inputs * outputs + num_rows * (inputs + outputs)) * setup.torch_dtype.itemsize
                rate = num_bytes / seconds
                row = {"product": name, "rows": num_rows, "way": way, "us": seconds * 1e6, "gbps": rate / 1e9}
                rows.append(row | {"share_of_read_rate": rate / rates.read_bytes_per_s})
    return {"read_gbps": rates.read_bytes_per_s / 1e9, "products": rows}


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, None)


@torch.inference_mode()
def _time(setup: Setup, product: Callable[[Tensor, Tensor], Tensor], num_rows: int, inputs: int, outputs: int) -> float:
    """Seconds of one product, as a part of a graph with many."""
    device, dtype = setup.torch_device, setup.torch_dtype
    x = torch.randn(num_rows, inputs, device=device, dtype=dtype)
    size = inputs * outputs * dtype.itemsize
    copies = max(2, -(-_COLD_BYTES // size)) if setup.is_gpu else 1
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]

    def run() -> None:
        for weight in weights:
            product(x, weight)

    if not setup.is_gpu:
        return setup.seconds(run) / copies
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return setup.seconds(graph.replay) / copies
