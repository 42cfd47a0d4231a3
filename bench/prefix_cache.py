"""What a shared prefix saves: ``python -m bench.prefix_cache``.

Two prompts that begin alike, one after the other, on a fresh engine: time to the first token of the second over that
of the first, and the tokens that each computed. CPU time of the step thread, the best of some pairs. Exit status 1 when
the ratio misses its bar.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from core.config import DEFAULT_MODEL, set_worker_environment
from core.ids import RequestId
from core.types import SamplingParams

TARGET = 0.2
"""Of the ratio when nine tenths are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    num_tokens: int
    """Of each prompt."""
    num_shared: int
    """Of the second one, with the first."""
    cold_s: list[float]
    """Time to the first token, pair by pair."""
    hit_s: list[float]

    @property
    def ratio(self) -> Ratio:
        return Ratio(
            name=f"time to first token, {self.num_shared / self.num_tokens:.0%} of blocks shared",
            best=min(self.hit_s) / min(self.cold_s),
            median=statistics.median(self.hit_s) / statistics.median(self.cold_s),
            bar=TARGET,
            is_at_most=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.prefix_cache", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=640, help="of each prompt")
    parser.add_argument("--shared", type=float, default=0.9, help="part of its blocks that the second prompt shares")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    set_worker_environment(1)  # before torch
    report = measure(options.model, options.tokens, options.shared, 2 if options.quick else options.pairs)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report) | {"ratios": as_json([report.ratio])}, indent=2) + "\n")
    return show([report.ratio])


def measure(model: str, num_tokens: int, shared: float, num_pairs: int) -> Report:
    """Print the row."""
    from engine.engine import Engine, EngineConfig
    from engine.sequence import Sequence, SequenceKey
    from modelfiles.model import open_model

    files = open_model(model)
    engine = Engine(files, EngineConfig())
    block_size = engine.limits.block_size
    num_shared = int(num_tokens // block_size * shared) * block_size

    def first_token(name: str, tokens: list[int]) -> tuple[float, int]:
        """Seconds until it is there, and the prompt tokens computed for it."""
        sequence = Sequence(
            key=SequenceKey(RequestId(name), 1, 0),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
        )
        started = time.thread_time()
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        return time.thread_time() - started, sequence.num_prompt_computed

    def prompt(seed: int) -> list[int]:
        return [(7919 * index + 104729 * seed) % files.config.vocab_size for index in range(num_tokens)]

    first_token("warm", prompt(-1)[:64])
    colds: list[float] = []
    hits: list[float] = []
    for pair in range(num_pairs):
        cold, num_computed = first_token(f"cold {pair}", prompt(2 * pair))
        hit, num_rest = first_token(f"hit {pair}", prompt(2 * pair)[:num_shared] + prompt(2 * pair + 1)[num_shared:])
        assert (num_computed, num_rest) == (num_tokens, num_tokens - num_shared), "a hit was computed again"
        colds.append(cold)
        hits.append(hit)
    print(
        f"prefix, {num_tokens} tokens: first token after {1e3 * min(colds):.0f} ms; with {num_shared} of them shared "
        f"{1e3 * min(hits):.0f} ms ({num_tokens - num_shared} computed)"
    )
    return Report(num_tokens=num_tokens, num_shared=num_shared, cold_s=colds, hit_s=hits)


if __name__ == "__main__":
    sys.exit(main())
