"""Times of our engine on one thread: CPU seconds of the step thread, one figure a round."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.ids import RequestId
from core.types import SamplingParams

if TYPE_CHECKING:
    from engine.sequence import Sequence as EngineSequence

BANDWIDTH_BYTES = 256 << 20
"""Read to find the machine's bandwidth: more than any cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTimes:
    decode: dict[int, list[float]]
    """Of a step, by number of streams."""
    prefill: list[float]


class OwnEngine:
    def __init__(self, model: str, dtype: str, kv_dtype: str, max_sequences: int) -> None:
        from engine.engine import Engine, EngineConfig
        from modelfiles.model import open_model

        self.files = open_model(model)
        config = EngineConfig(max_sequences=max_sequences, dtype=dtype, kv_dtype=kv_dtype)
        self.engine = Engine(self.files, config)
        self._seeds = itertools.count()

    def _add(self, tokens: Sequence[int], max_tokens: int) -> "EngineSequence":
        from engine.sequence import Sequence as EngineSequence
        from engine.sequence import SequenceKey

        sequence = EngineSequence(
            key=SequenceKey(RequestId(f"bench {next(self._seeds)}"), 1, 0),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            tokens=list(tokens),
            num_prompt_tokens=len(tokens),
        )
        self.engine.add(sequence)
        return sequence

    def _tokens(self, number: int) -> list[int]:
        seed = next(self._seeds)
        return [(7919 * index + 13 * seed) % self.files.config.vocab_size for index in range(number)]

    def decode(self, streams: int, *, context: int, steps: int, rounds: int) -> list[float]:
        prompt = context - steps * rounds // 2
        sequences = [self._add(self._tokens(prompt), 1000) for _ in range(streams)]
        while any(each.num_pending != 1 or not each.num_generated for each in sequences):
            self.engine.step()
        self.engine.step()
        times = []
        for _ in range(rounds):
            started = time.thread_time()
            for _ in range(steps):
                self.engine.step()
            times.append((time.thread_time() - started) / steps)
        for each in sequences:
            self.engine.remove(each.key)
        return times

    def prefill(self, num_tokens: int, *, rounds: int) -> list[float]:
        return [self._prompt(self._tokens(num_tokens)) for _ in range(rounds + 1)][1:]

    def _prompt(self, tokens: Sequence[int]) -> float:
        self._add(tokens, 1)
        started = time.thread_time()
        while self.engine.has_work:
            self.engine.step()
        return time.thread_time() - started

    def num_weights(self) -> int:
        """Numbers of the matrices that one decode step reads."""
        files = self.files
        names = [name for name in files.tensor_names() if "norm" not in name]
        return sum(files.load_tensor(name).size for name in names if "norm" not in name)


def read_bandwidth() -> float:
    """Bytes per second of one thread that reads memory, best of some."""
    import torch

    buffer = torch.ones(BANDWIDTH_BYTES // 4)
    best = float("inf")
    for _ in range(8):
        started = time.thread_time()
        buffer.sum()
        best = min(best, time.thread_time() - started)
    return BANDWIDTH_BYTES / best
