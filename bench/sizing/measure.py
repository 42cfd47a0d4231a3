"""Measures what the laws of :mod:`bench.sizing.fit` are fitted to, as a client of a live cluster with one worker of
each role: prompts alone, batches of answers, and the gap of the hand-off."""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.client.endpoint import Endpoint, Said
from bench.client.record import Record
from bench.client.scripts import Line, Part, Script
from bench.sizing.fit import Measured
from core.errors import InternalError

_FEW, _ALONE = 8, 6
"""Tokens of an answer whose gap is measured, and of one whose steps are counted beyond those in which others came."""
_BATCH_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is tried."""

    prompts: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    repeats: int = 5

    @classmethod
    def within(cls, *, max_step_tokens: int, max_sequences: int, max_context: int, repeats: int) -> "Sizes":
        """Eight prompts that one step can read, batches up to the largest (or 32), a short and a long context."""
        longest = max(64, min(max_step_tokens, max_context - 2 * _BATCH_STEPS))
        prompts = sorted({round(16 * (longest / 16) ** (number / 7)) for number in range(8)})
        batches = [size for size in (1, 2, 4, 8, 16, 32) if size <= max_sequences]
        return cls(prompts=prompts, batches=batches, contexts=(32, longest // 2), repeats=repeats)


async def measure(
    endpoint: Endpoint, sizes: Sizes, *, has_handoff: bool, show: Callable[[str], None] = lambda text: None
) -> Measured:
    """Raises InternalError when a request fails. Every prompt is new to every cache, but for those of one batch."""
    keys = (f"profile/{number}" for number in itertools.count())
    await _alone(endpoint, next(keys), sizes.prompts[0], _FEW)  # connections, first uses
    prompts, gaps = [], []
    for length in sizes.prompts:
        records = [await _alone(endpoint, next(keys), length, _FEW) for _ in range(sizes.repeats)]
        prompts.append((length, statistics.median(record.ttft_s for record in records)))
        gaps.append((length, statistics.median(record.itl_s[0] for record in records)))
        show(
            f"a prompt of {length} tokens: {1e3 * prompts[-1][1]:.1f} ms to its first token, "
            f"{1e3 * gaps[-1][1]:.1f} ms to the second"
        )
    steps = []
    for context, batch in itertools.product(sizes.contexts, sizes.batches):
        found = [await _batch(endpoint, next(keys), context, batch) for _ in range(max(1, sizes.repeats // 2))]
        steps.append((batch, context + _BATCH_STEPS // 2, statistics.median(found)))
        show(f"{batch} answers behind {context} tokens: {1e3 * steps[-1][2]:.2f} ms a step")
    return Measured(prompts=prompts, steps=steps, gaps=gaps if has_handoff else ())


async def _alone(endpoint: Endpoint, key: str, length: int, max_tokens: int) -> Record:
    return await _ask(endpoint, Script(lines=(Line(parts=(Part(key=key, num_tokens=length),), max_tokens=max_tokens),)))


async def _batch(endpoint: Endpoint, key: str, context: int, number: int) -> float:
    """Seconds of a step of so many answers. They have one prompt, which is read once; only the time in which all of
    them run counts."""
    line = Line(parts=(Part(key=key, num_tokens=context),), max_tokens=_BATCH_STEPS)
    await _ask(endpoint, Script(lines=(line,)))  # cached from here on
    line = Line(parts=line.parts, max_tokens=_BATCH_STEPS + 4 * number)
    records = await asyncio.gather(*(_ask(endpoint, Script(lines=(line,))) for _ in range(number)))
    from_at = max(record.times[min(2, len(record.times) - 1)] for record in records)
    until = min(record.times[-1] for record in records)
    rates = []
    for record in records:
        within = [at for at in record.times if from_at <= at <= until]
        if len(within) >= _ALONE:
            rates.append((within[-1] - within[0]) / (len(within) - 1))
    if not rates:
        raise InternalError(
            f"{number} answers never ran at the same time for {_ALONE} steps: does the cluster have room for so many, "
            "and does it send tokens one by one? Lower --batches"
        )
    return statistics.median(rates)


async def _ask(endpoint: Endpoint, script: Script) -> Record:
    record = await endpoint.ask(script, 0, endpoint.body(script, 0, Said()), due_at=0.0)
    if not record.is_ok or len(record.times) < 2:
        raise InternalError(f"a request of the profile failed: {record.error or 'its answer came in one piece'}")
    return record
