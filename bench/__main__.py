"""Every bench, one after the other: ``python -m bench``. What each measures it says itself; ratios and bars come last.

All run, whatever the others find. Exit status 1 when one missed a bar or failed.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BENCHES = (
    "cluster",
    "handoff",
    "prefix_cache",
    "cpu_engine",
    "gateway",
    "prefix_placement",
    "break_even",
    "overload",
    "router",
    "cost_table",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    bench: str
    holds: bool
    """It exited with 0."""
    figures: dict[str, object] | None
    """What it wrote; None when it failed before that."""

    @property
    def lines(self) -> list[str]:
        """Its ratios where its figures have them, and what became of it."""
        ratios = (self.figures or {}).get("ratios")
        told = [
            f"  {each['name']:48} {each['best']:6.2f}  bar {'<=' if each['is_at_most'] else '>='} {each['bar']}"
            f"  {'holds' if each['holds'] else 'MISSED'}"
            for each in (ratios if isinstance(ratios, list) else ())
        ]
        verdict = "holds" if self.holds else "FAILED" if self.figures is None else "MISSED a bar"
        return [f"bench.{self.bench}: {verdict}", *told]


def run(command: Sequence[str], bench: str, folder: Path) -> Outcome:
    """Its output is seen as it comes."""
    file = folder / f"{bench}.json"
    code = subprocess.run([*command, "--json", str(file)], check=False).returncode
    figures = json.loads(file.read_text()) if file.exists() else None
    return Outcome(bench=bench, holds=code == 0, figures=figures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all there")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES, metavar="BENCH", help=", ".join(BENCHES))
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for bench in options.only:
            print(f"== bench.{bench}", flush=True)
            command = [sys.executable, "-m", f"bench.{bench}", *(["--quick"] if options.quick else [])]
            outcomes.append(run(command, bench, Path(folder)))
    if options.json is not None:
        benches = {each.bench: {"holds": each.holds, "figures": each.figures} for each in outcomes}
        figures = {"machine": platform.platform(), "quick": options.quick, "benches": benches}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("==")
    for outcome in outcomes:
        print("\n".join(outcome.lines))
    return 0 if all(outcome.holds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
