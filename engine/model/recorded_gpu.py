"""Work of a device that is recorded once for each size and then replayed: CUDA graphs.

What is recorded reads and writes memory at fixed addresses only, and asks the host nothing. Where nothing can be
recorded (a CPU, or a model in which the host has a say) the same code runs as it is.
"""

from collections.abc import Callable, Sequence

import torch

Progress = Callable[[int, int], None]
"""``(done, of)``"""


class Recorded:
    """``compute(size)`` for some sizes; a smaller job takes the next larger one's."""

    def __init__(self, sizes: Sequence[int], compute: Callable[[int], None], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self._compute = compute
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_of(self, amount: int) -> int:
        return next(size for size in self.sizes if size >= amount)

    def run(self, amount: int) -> None:
        size = self.size_of(amount)
        graph = self._graphs.get(size)
        if graph is None:
            self._compute(size)
        else:
            graph.replay()

    @torch.inference_mode()
    def record(self, progress: Progress) -> None:
        """The largest first, so that the others share its memory. What is computed meanwhile must harm nobody."""
        if self._device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            self._compute(size)  # compiles, and lets libraries take their memory
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(size)
            self._graphs[size] = graph
        torch.cuda.synchronize(self._device)
        progress(len(self.sizes), len(self.sizes))
