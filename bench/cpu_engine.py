"""What the engine alone does on one CPU thread: ``python -m bench.cpu_engine``.

Milliseconds of one decode step at several batch sizes, and prefill tokens per second. CPU time of the step thread,
best of some steps, so that other processes disturb it least; a busy neighbour on the same core still shows (shared
caches and memory), so compare runs of one sitting only.
"""

import argparse
import time
from collections.abc import Sequence

from core.config import DEFAULT_MODEL, set_worker_environment
from core.ids import RequestId
from core.types import SamplingParams

NUM_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.cpu_engine", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence in the decode steps")
    parser.add_argument("--prompts", type=int, nargs="+", default=[43, 512, 2000], help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    set_worker_environment(options.threads)  # before torch
    measure(options.model, options.batches, options.context, options.prompts)


def measure(model: str, batches: Sequence[int], context: int, prompts: Sequence[int]) -> None:
    from engine.engine import Engine, EngineConfig
    from engine.sequence import Sequence as EngineSequence
    from engine.sequence import SequenceKey
    from modelfiles.model import open_model

    files = open_model(model)
    engine = Engine(files, EngineConfig(max_sequences=max(batches)))

    def add(name: str, num_tokens: int, max_tokens: int) -> EngineSequence:
        sequence = EngineSequence(
            key=SequenceKey(RequestId(name), 1, 0),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            tokens=[(7919 * index + 13 * len(name)) % files.config.vocab_size for index in range(num_tokens)],
            num_prompt_tokens=num_tokens,
        )
        engine.add(sequence)
        return sequence

    for batch in batches:
        sequences = [add(f"decode {index}", context - NUM_STEPS, 1000) for index in range(batch)]
        while any(sequence.num_pending != 1 or not sequence.num_generated for sequence in sequences):
            engine.step()
        times = []
        for _ in range(NUM_STEPS):
            started = time.thread_time()
            engine.step()
            times.append(time.thread_time() - started)
        print(f"decode, {batch:3} sequences of {context} tokens: {1e3 * min(times):7.1f} ms a step")
        for sequence in sequences:
            engine.remove(sequence.key)
    for num_tokens in prompts:
        add("prompt", num_tokens, 1)
        started = time.thread_time()
        while engine.has_work:
            engine.step()
        elapsed = time.thread_time() - started
        print(f"prefill, {num_tokens:4} tokens: {num_tokens / elapsed:7.0f} tokens/s ({1e3 * elapsed:.0f} ms)")


if __name__ == "__main__":
    main()
