"""How long a long prompt's hand-over takes: from the end of its last chunk at P to the start of D's first decode step.

A whole cluster on an idle machine: this process is router and gateway, P and D are children. All times are those of the
machine's monotonic clock. Beside each hand-over as many blocks are copied with numpy, so that a noisy
neighbour meets both.

Over a throttled link the reads of earlier chunks hide behind the later chunks. What stays exposed is held against the
ideal: a chunk can move once it was computed, and the link moves one after the other.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.two_workers import CHUNK_TOKENS, Cluster, Notes, Setup, Span

NUM_TOKENS = 2000
HIDDEN = 0.6
"""A throttled link moves a chunk in this share of the time that P computes one: it can hide all but the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One hand-over. Seconds."""

    chunk_ends: tuple[float, ...]
    """Of P's steps, on the monotonic clock."""
    chunk_s: float
    """The median of P's full chunks."""
    exposed_s: float
    """From the end of the last chunk to D's first step."""
    num_bytes: int
    late_bytes: int
    """Posted after the last chunk was computed."""
    digest_s: float
    """Of ``exposed_s``: somebody digests and nothing moves."""
    memcpy_s: float
    """As many bytes as ``late_bytes``, in as many blocks."""


async def hand_over(cluster: Cluster, seed: int) -> HandOver:
    """One request with a prompt that nobody has seen."""
    prompt = random.Random(seed).choices(range(1000, 20000), k=NUM_TOKENS)
    return _hand_over(*await cluster.complete(prompt))


def _hand_over(prefill: Notes, decode: Notes) -> HandOver:
    chunk_ends = tuple(ended for _, ended in prefill.steps)
    sealed_at, runs_at = chunk_ends[-1], decode.steps[0][0]
    moves = decode.moves
    moving = [(move.posted_at, move.done_at) for move in moves]
    late_bytes = sum(move.num_bytes for move in moves if move.posted_at >= sealed_at)
    full = [ended - began for began, ended in prefill.steps[:-1]] or [chunk_ends[-1] - prefill.steps[0][0]]
    return HandOver(
        chunk_ends=chunk_ends,
        chunk_s=statistics.median(full),
        exposed_s=runs_at - sealed_at,
        num_bytes=sum(move.num_bytes for move in moves),
        late_bytes=late_bytes,
        digest_s=_covered([*prefill.digests, *decode.digests], sealed_at, runs_at, without=moving),
        memcpy_s=_memcpy_s(late_bytes),
    )


def _covered(spans: Sequence[Span], begin: float, end: float, *, without: Sequence[Span]) -> float:
    """Seconds of [begin, end] that lie in one of ``spans`` and in none of ``without``."""
    cuts = sorted({begin, end, *(t for span in (*spans, *without) for t in span if begin < t < end)})
    total = 0.0
    for low, high in pairwise(cuts):
        middle = (low + high) / 2
        if any(a <= middle <= b for a, b in spans) and not any(a <= middle <= b for a, b in without):
            total += high - low
    return total


_BLOCK_BYTES = 737_280
_memory: list[np.ndarray] = []


def _memcpy_s(num_bytes: int) -> float:
    """The best of three copies of as many scattered blocks of the default model."""
    if not _memory:
        _memory.extend(np.ones((320, _BLOCK_BYTES), dtype=np.uint8) for _ in range(2))
    source, target = _memory
    num_blocks = max(1, round(num_bytes / _BLOCK_BYTES))
    rng = random.Random(num_bytes)
    best = float("inf")
    for _ in range(3):
        pairs = list(zip(rng.sample(range(320), num_blocks), rng.sample(range(320), num_blocks), strict=True))
        began = time.perf_counter()
        for a, b in pairs:
            target[b] = source[a]
        best = min(best, time.perf_counter() - began)
    return best


def ideal_exposed_s(hand_over: HandOver, bytes_per_s: float) -> float:
    """What a link of that rate leaves exposed when each chunk moves as soon as it is computed and the link is free."""
    num_chunks = len(hand_over.chunk_ends)
    shares = [CHUNK_TOKENS] * (num_chunks - 1)
    shares.append(NUM_TOKENS - sum(shares))
    free_at = 0.0
    for ended_at, share in zip(hand_over.chunk_ends, shares, strict=True):
        free_at = max(free_at, ended_at) + hand_over.num_bytes * share / NUM_TOKENS / bytes_per_s
    return free_at - hand_over.chunk_ends[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Seconds. Of the hand-overs of one cluster on an idle link, and of one over a throttled link."""

    backend: str
    kv_dtype: str
    best: HandOver
    """The hand-over that came closest to its bar."""
    median_exposed_s: float
    bar_s: float
    """1.5 times the memcpy of what was left to move, and 3 ms."""
    digest_share: float
    """Of the best hand-over."""
    throttled_exposed_s: float
    throttled_ideal_s: float
    throttled_bytes_per_s: float


async def measure(setup: Setup, rounds: int, throttled_rounds: int) -> Report:
    async with Cluster.start(setup) as cluster:
        await hand_over(cluster, 0)
        runs = [await hand_over(cluster, 1 + number) for number in range(rounds)]
        best = min(runs, key=lambda run: run.exposed_s / _bar_s(run))
        chunk_bytes = best.num_bytes * CHUNK_TOKENS / NUM_TOKENS
        rate = chunk_bytes / (HIDDEN * min(run.chunk_s for run in runs))
        cluster.bytes_per_s = rate
        slow = [await hand_over(cluster, 1000 + number) for number in range(throttled_rounds)]
    closest = min(slow, key=lambda run: run.exposed_s / ideal_exposed_s(run, rate))
    return Report(
        backend=setup.backend,
        kv_dtype=cluster.kv_dtype,
        best=best,
        median_exposed_s=statistics.median(run.exposed_s for run in runs),
        bar_s=_bar_s(best),
        digest_share=best.digest_s / best.exposed_s,
        throttled_exposed_s=closest.exposed_s,
        throttled_ideal_s=ideal_exposed_s(closest, rate),
        throttled_bytes_per_s=rate,
    )


def _bar_s(run: HandOver) -> float:
    return 1.5 * run.memcpy_s + 3e-3


def render(report: Report) -> str:
    best = report.best
    return "\n".join(
        (
            f"hand-over of {NUM_TOKENS} tokens in chunks of {CHUNK_TOKENS}, KV in {report.kv_dtype}, {report.backend}: "
            f"{best.num_bytes / 1e6:.0f} MB, {best.late_bytes / 1e6:.0f} MB of them after the last chunk",
            f"  exposed   {best.exposed_s * 1e3:7.2f} ms best, median {report.median_exposed_s * 1e3:.2f}; "
            f"memcpy of what was left {best.memcpy_s * 1e3:.2f} ms",
            f"  digests   {best.digest_s * 1e3:7.2f} ms while nothing moved",
            f"over a link of {report.throttled_bytes_per_s / 1e6:.0f} MB/s, a chunk moves in {HIDDEN:.0%} of its "
            f"computation:",
            f"  exposed   {report.throttled_exposed_s * 1e3:7.1f} ms, ideal {report.throttled_ideal_s * 1e3:.1f} ms",
        )
    )
