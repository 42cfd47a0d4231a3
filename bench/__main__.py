"""Every bench, one after the other: ``python -m bench``. What each measures it says itself; ratios and bars come last.

All run, whatever the others find. Exit status 1 when one missed a bar or failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
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
    "virtual_cluster",
    "split_or_not",
    "plan_accuracy",
    "simulator_accuracy",
    "peers",
    "aiperf",
    "telemetry",
)
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
"""Between them stands, in the file of ``--markdown``, what the last run said."""


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
        if (absent := (self.figures or {}).get("absent")) is not None:
            return [f"bench.{self.bench}: nothing beside it, {absent} is not installed"]
        verdict = "holds" if self.holds else "FAILED" if self.figures is None else "MISSED a bar"
        return [f"bench.{self.bench}: {verdict}", *told]


def run(command: Sequence[str], bench: str, folder: Path) -> Outcome:
    """Its output is seen as it comes."""
    file = folder / f"{bench}.json"
    code = subprocess.run([*command, "--json", str(file)], check=False).returncode
    figures = json.loads(file.read_text()) if file.exists() else None
    return Outcome(bench=bench, holds=code == 0, figures=figures)


def markdown(outcomes: Sequence[Outcome], *, is_quick: bool) -> str:
    """All ratios as one table."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        f"Of {when}, {'`--quick`' if is_quick else 'in full'}, {platform.platform()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| Bench | Ratio | Figure | Bar |",
        "| --- | --- | ---: | --- |",
    ]
    for outcome in outcomes:
        ratios = (outcome.figures or {}).get("ratios")
        for each in ratios if isinstance(ratios, list) else ():
            missed = "" if each["holds"] else ", **missed**"
            bar = f"at {'most' if each['is_at_most'] else 'least'} {each['bar']}{missed}"
            lines.append(f"| `bench.{outcome.bench}` | {each['name']} | {each['best']:.2f} | {bar} |")
        if not ratios:
            lines.append(f"| `bench.{outcome.bench}` | {outcome.lines[0].partition(': ')[2]} | | |")
    return "\n".join(lines) + "\n"


def insert(text: str, section: str) -> str:
    """``section`` in the place of what stands between the marks; behind everything where there are none."""
    before, begin, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = before if begin else before.rstrip() + "\n\n## The last run of `make bench`\n\n"
    return f"{head}{BEGIN}\n{section}{END}{after or chr(10)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put a table of all ratios into it")
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
    if options.markdown is not None:
        text = options.markdown.read_text() if options.markdown.exists() else ""
        options.markdown.write_text(insert(text, markdown(outcomes, is_quick=options.quick)))
    print("==")
    for outcome in outcomes:
        print("\n".join(outcome.lines))
    return 0 if all(outcome.holds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
