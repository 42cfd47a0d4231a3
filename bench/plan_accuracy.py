"""``baton plan`` against the simulator, on workloads of different shape: the split that the formulas choose, and the
best of all splits as simulated. ``python -m bench.plan_accuracy``. Bars: what the chosen split serves over what the
best one does, and "do not split" for the Azure code trace.

Splits that the formulas put below half of their best are not simulated, unless ``--all`` says so.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Ratio, as_json, show
from bench.client.figures import Objective
from bench.client.scripts import Script
from bench.client.shapes import SHAPES, Shape
from bench.client.traces import read_trace
from bench.sizing.model import Split
from bench.sizing.plan import Plan, Row, make_plan
from bench.sizing.profile import read_profile
from bench.sizing.simulate import simulated_knee
from bench.workloads import Lengths

HERE = Path(__file__).parent
BAR = 0.95
SHARE = 0.9
WORKERS = 6
_HOPELESS = 0.5
HORIZON_S = 15.0
PROFILE = read_profile(HERE / "profiles" / "qwen3-8b-h200-computed.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    objective: Objective
    trace: str = ""
    prompt: Lengths | None = None
    answer: Lengths | None = None
    """Of those without a trace."""
    shape: str = "random"

    def scripts(self) -> list[Script]:
        if self.trace:
            return read_trace(HERE / "traces" / self.trace)
        assert self.prompt is not None and self.answer is not None, "either a trace or lengths"
        shape = Shape(prompt=self.prompt, answer=self.answer, shared=Lengths(median=2000), long=Lengths(median=8000))
        return list(itertools.islice(SHAPES[self.shape](shape), 1000))


def _case(
    name: str, prompt: float, answer: float, ttft_s: float, tpot_s: float, shape: str = "random", sigma: float = 0.6
) -> Case:
    return Case(
        name=name,
        objective=Objective(ttft_s=ttft_s, tpot_s=tpot_s),
        prompt=Lengths(median=prompt, sigma=sigma, longest=60_000),
        answer=Lengths(median=answer, sigma=sigma, longest=4000),
        shape=shape,
    )


CASES = (
    _case("6000 in, 200 out", 6000, 200, 1.5, 0.010),
    _case("2000 in, 400 out", 2000, 400, 1.0, 0.008),
    _case("600 in, 900 out", 600, 900, 0.5, 0.007),
    _case("12000 in, 300 out", 12_000, 300, 3.0, 0.012),
    _case("4000 in, 100 out, alike", 4000, 100, 1.0, 0.008, sigma=0.1),
    _case("1000 in, 150 out", 1000, 150, 0.3, 0.008),
    _case("3000 in, 60 out", 3000, 60, 0.6, 0.010),
    _case("long prompts among chat", 600, 250, 1.0, 0.008, "mixed"),
    _case("shared beginnings", 800, 200, 0.5, 0.008, "shared-prefix"),
    _case("1500 in, 1500 out", 1500, 1500, 1.0, 0.010),
    Case(
        name="Azure conversations", objective=Objective(ttft_s=0.5, tpot_s=0.008), trace="azure_2023_conv_1500.csv.gz"
    ),
    Case(name="Azure code", objective=Objective(ttft_s=1.0, tpot_s=0.020), trace="azure_2023_code_1500.csv.gz"),
)
CODE = "Azure code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: str
    plan: Plan
    simulated: dict[Split, float]
    """Of unified workers too."""

    @property
    def best(self) -> Split:
        return max(self.simulated, key=lambda split: self.simulated[split])

    def kept(self, split: Split) -> float:
        """Of what the best serves; 0 for one that was hopeless."""
        return self.simulated.get(split, 0.0) / self.simulated[self.best]


def run(case: Case, *, everything: bool = False, number: int = 300) -> Outcome:
    scripts = case.scripts()
    plan = make_plan(PROFILE, scripts, case.objective, num_workers=WORKERS, share=SHARE)
    candidates: Sequence[Row] = (*plan.rows, plan.unified)
    hopeful = [
        row
        for row in candidates
        if everything or row.rate >= _HOPELESS * plan.best.rate or row.split == plan.naive.split
    ]
    simulated = {
        row.split: simulated_knee(
            PROFILE,
            row.split,
            scripts,
            case.objective,
            share=SHARE,
            guess=row.rate,
            number=number,
            horizon_s=HORIZON_S,
            precision=0.04,
        )
        for row in hopeful
    }
    return Outcome(case=case.name, plan=plan, simulated=simulated)


def told(outcome: Outcome) -> str:
    plan, best = outcome.plan, outcome.best
    chosen = plan.best.split
    rows = ", ".join(f"{split} {rate:.1f}" for split, rate in outcome.simulated.items())
    return (
        f"{outcome.case}: chosen {chosen} (formulas {plan.best.rate:.1f}/s), best {best}, "
        f"{outcome.kept(chosen):.0%} of it; naive {plan.naive.split}, {outcome.kept(plan.naive.split):.0%}. "
        f"Simulated: {rows}"
    )


def ratios(outcomes: Sequence[Outcome]) -> list[Ratio]:
    found = []
    for each in outcomes:
        kept = each.kept(each.plan.best.split)
        found.append(Ratio(name=f"{each.case}: chosen over best", best=kept, median=kept, bar=BAR))
        if each.case == CODE:
            refused = float(not each.plan.is_split)
            found.append(Ratio(name="Azure code is not to be split", best=refused, median=refused, bar=1.0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.plan_accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two of them")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--all", action="store_true", help="simulate hopeless splits too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.only or ([CASES[6].name, CODE] if options.quick else [case.name for case in CASES])
    outcomes = []
    for case in CASES:
        if case.name in names:
            began = time.process_time()
            outcomes.append(run(case, everything=options.all))
            print(f"{told(outcomes[-1])} ({time.process_time() - began:.0f} s of CPU)", flush=True)
    found = ratios(outcomes)
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": as_json(found)}, indent=2) + "\n")
    return show(found)


if __name__ == "__main__":
    sys.exit(main())
