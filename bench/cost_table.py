"""Measures the cost table of mock execution: ``python -m bench.cost_table --json bench/costs/NAME.json``.

One engine on one thread: CPU time of the step thread, best of some rounds, for prompts and batches of several sizes, at
two contexts each, and for a step with both. On a busy machine that is up to twice what it is on a quiet one. Reads of
KV are measured between two processes, by the clock. Then the table is asked for steps that it was not made of: bars are
on what it says over what they take.
"""

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import handoff
from bench.bars import Ratio, show
from bench.end import BLOCK_SIZE
from core.config import DEFAULT_MODEL, set_worker_environment
from core.costs import HandoffCosts, StepCosts, StepWork
from core.ids import RequestId
from core.types import SamplingParams

if TYPE_CHECKING:
    from engine.sequence import Sequence as EngineSequence

PROMPTS = (1, 16, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONG_CONTEXT = 1024
SHORT_CONTEXT = 32
MIXED = (256, 8)
"""Prompt tokens and decode rows of the step that shows what both share."""
HELD_OUT_PROMPTS = ((200, 0), (96, 384))
"""(prompt tokens, context before them) that the table is not made of ..."""
HELD_OUT_BATCHES = ((12, 300), (24, 128))
"""... and (decode rows, context of each)."""
MANY_BLOCKS = 64
TOLERANCE = 0.25
NEVER = 1 << 20


class Stepper:
    """The engine, and the work of one step at a time."""

    def __init__(self, model: str, dtype: str, rounds: int) -> None:
        from engine.engine import Engine, EngineConfig
        from modelfiles.model import open_model

        self._rounds = rounds
        self._seeds = itertools.count()
        self.engine = Engine(
            open_model(model),
            EngineConfig(
                max_step_tokens=2048, max_mixed_tokens=2048, max_sequences=max(BATCHES), dtype=dtype, prefix_cache=False
            ),
        )

    def prompt_s(self, num_tokens: int, context: int = 0) -> float:
        """Best of some steps that compute ``num_tokens`` of a prompt behind ``context`` of it."""
        return min(self._prompt_once(num_tokens, context) for _ in range(self._rounds))

    def decode_s(self, num_rows: int, context: int) -> float:
        """Best of some steps that advance so many answers."""
        return self._beside(num_rows, context, self._timed_step)

    def mixed_s(self, num_tokens: int, num_rows: int, context: int) -> float:
        """Best of some steps that do both."""

        def step() -> float:
            added = self._add(num_tokens)
            seconds = self._timed_step()
            self.engine.remove(added.key)
            return seconds

        return self._beside(num_rows, context, step)

    def _prompt_once(self, num_tokens: int, context: int) -> float:
        sequence = self._add(context or num_tokens, pause_at=context + 1 if context else None)
        if context:
            self.engine.step()
            sequence = self.engine.detach(sequence.key)
            sequence.tokens += self._tokens(num_tokens - 1)  # behind the one that it has drawn
            sequence.pause_at = None
            self.engine.add(sequence)
        seconds = self._timed_step()
        self.engine.remove(sequence.key)
        return seconds

    def _beside(self, num_rows: int, context: int, step: Callable[[], float]) -> float:
        sequences = [self._add(context) for _ in range(num_rows)]
        while any(each.num_pending != 1 or not each.num_generated for each in sequences):
            self.engine.step()
        best = min(step() for _ in range(self._rounds + 2))
        for each in sequences:
            self.engine.remove(each.key)
        return best

    def _timed_step(self) -> float:
        started = time.thread_time()
        self.engine.step()
        return time.thread_time() - started

    def _add(self, num_tokens: int, pause_at: int | None = None) -> "EngineSequence":
        from engine.sequence import Sequence as EngineSequence
        from engine.sequence import SequenceKey

        sequence = EngineSequence(
            key=SequenceKey(RequestId(f"step {next(self._seeds)}"), 1, 0),
            sampling=SamplingParams(temperature=0.0, max_tokens=NEVER, ignore_eos=True),
            tokens=self._tokens(num_tokens),
            num_prompt_tokens=num_tokens,
            pause_at=pause_at,
        )
        self.engine.add(sequence)
        return sequence

    def _tokens(self, number: int) -> list[int]:
        seed = next(self._seeds)
        return [(7919 * index + 13 * seed) % self.engine.limits.vocab_size for index in range(number)]


def measure(stepper: Stepper, *, prompts: Sequence[int], batches: Sequence[int], where: str) -> StepCosts:
    """The table, without hand-offs."""
    longest, largest = max(PROMPTS[:-1]), max(batches)
    pair_s = max(0.0, stepper.prompt_s(longest, LONG_CONTEXT) - stepper.prompt_s(longest)) / (longest * LONG_CONTEXT)
    rows = min(4, largest)
    position_s = max(0.0, stepper.decode_s(rows, LONG_CONTEXT) - stepper.decode_s(rows, SHORT_CONTEXT))
    position_s /= rows * (LONG_CONTEXT - SHORT_CONTEXT)
    prompt = [(n, stepper.prompt_s(n) - pair_s * n * (n + 1) / 2) for n in prompts]
    decode = [(m, stepper.decode_s(m, SHORT_CONTEXT) - position_s * m * (SHORT_CONTEXT + 2)) for m in batches]
    table = StepCosts(
        prompt=_ascending(prompt),
        decode=_ascending(decode),
        prompt_pair_s=pair_s,
        decode_position_s=position_s,
        measured=where,
    )
    num_tokens, num_rows = MIXED
    apart_s = table.step_s(_prompt_work(num_tokens)) + table.step_s(_decode_work(num_rows, SHORT_CONTEXT))
    shared_s = max(0.0, apart_s - stepper.mixed_s(num_tokens, num_rows, SHORT_CONTEXT))
    return table.model_copy(update={"shared_s": shared_s})


def measure_handoff(rounds: int) -> HandoffCosts:
    """Of the default model's KV over NIXL, between two processes of this machine."""
    report = handoff.measure("nixl", MANY_BLOCKS, rounds)
    many_s = MANY_BLOCKS * report.block_bytes / report.fetch_gbps / 1e9
    block_s = max(0.0, many_s - report.one_block_best_s) / (MANY_BLOCKS - 1)
    return HandoffCosts(fixed_s=max(0.0, report.one_block_best_s - block_s), token_s=block_s / BLOCK_SIZE)


def check(stepper: Stepper, table: StepCosts) -> list[Ratio]:
    """What the table says over what a step takes, for steps that it was not made of."""
    told = [
        (f"a prompt's {n} tokens behind {c}", table.step_s(_prompt_work(n, c)), stepper.prompt_s(n, c))
        for n, c in HELD_OUT_PROMPTS
    ]
    told += [
        (f"{m} answers behind {c}", table.step_s(_decode_work(m, c)), stepper.decode_s(m, c))
        for m, c in HELD_OUT_BATCHES
    ]
    return [_ratio(name, said_s / took_s) for name, said_s, took_s in told]


def _ratio(name: str, value: float) -> Ratio:
    """Distance from 1, whichever way."""
    off = max(value, 1 / value)
    return Ratio(name=f"{name}: off by", best=off, median=off, bar=1 + TOLERANCE, is_at_most=True)


def _prompt_work(num_tokens: int, context: int = 0) -> StepWork:
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    return StepWork(num_prompt_tokens=num_tokens, num_prompt_pairs=pairs)


def _decode_work(num_rows: int, context: int) -> StepWork:
    return StepWork(num_decode_rows=num_rows, num_decode_positions=num_rows * (context + 2))


def _ascending(rows: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More work takes no less, whatever a noisy neighbour made of one figure."""
    seconds = list(itertools.accumulate((each for _, each in rows), max))
    return tuple((number, round(each, 7)) for (number, _), each in zip(rows, seconds, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cost_table", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    set_worker_environment(1)  # before torch
    import torch

    torch.set_num_threads(1)
    stepper = Stepper(options.model, options.dtype, 2 if options.quick else options.rounds)
    kv_format = stepper.engine.format
    where = (
        f"{options.model}, {kv_format.compute_dtype} with KV in {kv_format.kv_dtype}, one thread of "
        f"{_processor()}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    prompts, batches = (PROMPTS[::2], BATCHES[::2]) if options.quick else (PROMPTS, BATCHES)
    table = measure(stepper, prompts=prompts, batches=batches, where=where)
    table = table.model_copy(update={"handoff": measure_handoff(5 if options.quick else 20)})
    text = table.model_dump_json(indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return show(check(stepper, table))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
