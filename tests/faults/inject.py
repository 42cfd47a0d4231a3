"""The injector: seeded faults through the real hand-off, on the inproc backend and in virtual time.

A *case* is a small cluster, a few requests and one to five faults (:mod:`tests.faults.kinds`). It ends with an audit
(:mod:`tests.faults.audit`): nothing wrong was attended to or published, every block is accounted for and back, every
request and hand-off has ended, and the cluster still answers. A case is its seed: run one again with
``python -m tests.faults.inject --seed N --cases 1``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.virtual.loop import VirtualLoop
from tests.faults.audit import Bugs
from tests.faults.case import Case, CaseResult
from tests.faults.kinds import KINDS


def run_case(seed: int, kinds: Iterable[str] | None = None) -> CaseResult:
    """One case, by itself."""
    loop, bugs = VirtualLoop(), Bugs()
    log = logging.getLogger("core.tasks")
    log.addHandler(bugs)
    case = Case(seed, kinds)
    try:
        result = loop.run(case.run())
    finally:
        log.removeHandler(bugs)
    texts = [*bugs.texts, *(f"{each.get('message')}: {each.get('exception')!r}" for each in loop.errors)]
    result.damage += [("bug", text) for text in texts]
    return result


@dataclass
class Tally:
    """Counts by kind."""

    fates: dict[str, Counter[str]] = field(default_factory=dict)
    damage: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    num_cases: int = 0
    num_requests: int = 0

    def add(self, result: CaseResult) -> None:
        self.num_cases += 1
        self.num_requests += result.num_requests
        for kind, fate in result.faults:
            self.fates.setdefault(kind, Counter())[fate] += 1
        for kind, text in result.damage:
            self.damage[kind] += 1
            if len(self.examples) < 20:
                self.examples.append(f"seed {result.seed}: {kind}: {text}")

    @property
    def num_effective(self) -> int:
        """Faults that took effect."""
        return sum(
            n for fates in self.fates.values() for fate, n in fates.items() if fate not in ("missed", "no effect")
        )

    def table(self) -> str:
        lines = [f"{'kind':<22}{'injected':>9}{'effect':>8}  what met it"]
        for kind in KINDS:
            fates = self.fates.get(kind, Counter())
            effective = {fate: n for fate, n in fates.most_common() if fate not in ("missed", "no effect")}
            met = ", ".join(f"{fate} {n}" for fate, n in effective.items())
            lines.append(f"{kind:<22}{fates.total():>9}{sum(effective.values()):>8}  {met}")
        total = sum(fates.total() for fates in self.fates.values())
        lines.append(
            f"{'all':<22}{total:>9}{self.num_effective:>8}  {self.num_cases} cases, {self.num_requests} requests"
        )
        lines.append(f"damage: {dict(self.damage) or 'none'}")
        return "\n".join([*lines, *self.examples])


def run_cases(seeds: Iterable[int], kinds: Iterable[str] | None = None) -> Tally:
    tally = Tally()
    is_collecting = gc.isenabled()
    gc.disable()  # cycles of thousands of small clusters: collected from time to time, without what was there before
    gc.freeze()
    try:
        for number, seed in enumerate(seeds):
            tally.add(run_case(seed, kinds))
            if number % 50 == 49:
                gc.collect()
    finally:
        gc.unfreeze()
        if is_collecting:
            gc.enable()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only these")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.process_time()
    tally = run_cases(range(asked.seed, asked.seed + asked.cases), asked.kind)
    print(tally.table())
    print(f"{time.process_time() - began:.1f} s of CPU")
    return 1 if tally.damage else 0


if __name__ == "__main__":
    sys.exit(main())
