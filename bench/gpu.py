"""The GPU engine on the machine at hand, in at most eight minutes: ``python -m bench.gpu --json FILE``.

Each step is a process of its own with a limit of its own, so that one that fails, hangs or breaks the device's context
does not lose the others: kernels against their twins, steps of answers and prompts against floors measured in the same
process, streams through the engine, a hand-off between two processes on the one device, ``transformers`` beside it.
Ratios and bars come last. Exit status 1 when one missed a bar or a step failed.

``--device interpreter`` runs every line of it on a CPU at tiny sizes; nothing is measured then, and no bar counts but
that results are right.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bars import Ratio, as_json, show
from core.config import set_worker_environment

LIMIT_S = 480.0
"""Of all steps together. Triton compiles a kernel in 1 to 3 s, once: what it made is kept between the steps."""
NUM_THREADS = 4
"""Of the host, for what a step computes there."""
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    limit_s: float
    is_essential: bool = True
    """Its failure is one of the bench."""


STEPS = (
    Step(name="kernels", limit_s=120),
    Step(name="decode", limit_s=110),
    Step(name="prefill", limit_s=70),
    Step(name="streams", limit_s=100),
    Step(name="hand_over", limit_s=90),
    Step(name="peer", limit_s=80, is_essential=False),
    Step(name="peer_batching", limit_s=60, is_essential=False),
    Step(name="products", limit_s=40, is_essential=False),
)


# -- one step, in its own process -------------------------------------------------------------------------------------


def run_step(name: str, device: str, folder: Path) -> Figures:
    """Imports torch and Triton, and nothing that this step does not want."""
    from bench.on_gpu.setup import Setup

    setup = Setup(device, folder)
    match name:
        case "kernels":
            from bench.on_gpu.kernels import Checks, bound_of

            checks = Checks(setup)
            errors = checks.run()
            wrong = {name: error for name, error in errors.items() if not _is_within(error, bound_of(name))}
            return {"device": _device_name(setup.is_gpu), "seed": checks.seed, "errors": errors, "wrong": wrong}
        case "decode":
            from bench.on_gpu.steps import decode_steps

            return decode_steps(setup)
        case "prefill":
            from bench.on_gpu.steps import prefills

            return prefills(setup)
        case "streams":
            from bench.on_gpu.streams import streams

            return streams(setup)
        case "hand_over":
            from bench.on_gpu.hand_over import hand_over

            return hand_over(setup, folder)
        case "products":
            from bench.on_gpu.products import products

            return products(setup)
        case "peer":
            from bench.on_gpu.peer import static_cache

            return static_cache(setup)
        case "peer_batching":
            from bench.on_gpu.peer import continuous_batching

            return continuous_batching(setup)
    raise SystemExit(f"there is no step {name!r}: {', '.join(step.name for step in STEPS)}")


def _is_within(error: float | str, bound: float) -> bool:
    return not isinstance(error, str) and error <= bound


def _device_name(is_gpu: bool) -> str:
    if not is_gpu:
        return "Triton's interpreter"
    import torch
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    step: Step
    seconds: float
    figures: Figures | None
    error: str = ""
    """Why there are none: the end of what the process said."""


def run_steps(names: tuple[str, ...], device: str, tell: Callable[[Outcome], None]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    ends_at = time.monotonic() + LIMIT_S
    for step in STEPS:
        if step.name in names:
            outcome = _in_own_process(step, device, min(step.limit_s, ends_at - time.monotonic()))
            outcomes.append(outcome)
            tell(outcome)
    return outcomes


def _in_own_process(step: Step, device: str, limit_s: float) -> Outcome:
    if limit_s <= 5 and device == "cuda":
        return Outcome(step=step, seconds=0.0, figures=None, error="no time was left")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        command = [sys.executable, "-m", "bench.gpu", "--step", step.name, "--device", device, "--json", str(file)]
        with log.open("wb") as output:
            # A session of its own: what it started ends with it.
            child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(limit_s)
            finally:
                _end_session(child)
        seconds = time.monotonic() - began
        if file.exists():
            return Outcome(step=step, seconds=seconds, figures=json.loads(file.read_text()))
        said = log.read_text(errors="replace").strip()[-1500:]
        why = f"ended with {child.returncode}" if seconds < limit_s else f"took longer than {limit_s:.0f} s"
        return Outcome(step=step, seconds=seconds, figures=None, error=f"{why}: {said}")


def _end_session(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# -- bars -------------------------------------------------------------------------------------------------------------


def ratios_of(figures: Mapping[str, Figures]) -> list[Ratio]:
    """Those that the steps at hand allow."""
    ratios: list[Ratio] = []

    def add(name: str, value: float, bar: float, *, is_at_most: bool = True) -> None:
        ratios.append(Ratio(name=name, best=value, median=value, bar=bar, is_at_most=is_at_most))

    for row in figures.get("decode", {}).get("steps", ()):
        bar = {1: 1.20, 8: 1.30, 64: 1.35, 256: 1.6}.get(row["rows"])
        if bar is not None:
            add(f"step, {row['rows']} rows at {row['context']}, over its floor", row["ratio"], bar)
    for row in figures.get("prefill", {}).get("prefills", ()):
        if row["tokens"] < 100:
            add(f"prompt of {row['tokens']} over the weight read", row["over_weight_read"], 1.3)
        else:
            bar = 0.50 if row["tokens"] <= 512 else 0.65
            share = row["share_of_matrix_rate"]
            add(f"prompt of {row['tokens']}, share of the matrix rate", share, bar, is_at_most=False)
    if "streams" in figures:
        streams = figures["streams"]
        add("time between tokens, many streams over one", streams["itl_ratio"], 1.20)
        for row in streams["streams"]:
            add(f"step to step over the device's, {row['streams']} streams", row["wall_over_step"], 1.05)
    if "hand_over" in figures:
        add(f"hand-over of {figures['hand_over']['tokens']} tokens, ms", figures["hand_over"]["ms"], 5.0)
    return ratios + _against_peer(figures)


def _against_peer(figures: Mapping[str, Figures]) -> list[Ratio]:
    ours = {row["streams"]: row["tokens_per_s"] for row in figures.get("streams", {}).get("streams", ())}
    theirs: dict[int, float] = {}
    for name in ("peer", "peer_batching"):
        for row in figures.get(name, {}).get("runs", ()):
            if "tokens_per_s" in row:
                theirs[row["streams"]] = max(theirs.get(row["streams"], 0.0), row["tokens_per_s"])
    return [
        Ratio(
            name=f"tokens/s over transformers, {streams} streams",
            best=ours[streams] / rate,
            median=ours[streams] / rate,
            bar=2.0 if streams == 1 else 4.0,
        )
        for streams, rate in theirs.items()
        if streams in ours
    ]


def wrong_results(figures: Mapping[str, Figures]) -> list[str]:
    """What is not right, whatever the speed."""
    wrong = [f"kernel {name}: {error}" for name, error in figures.get("kernels", {}).get("wrong", {}).items()]
    if not figures.get("hand_over", {}).get("is_equal", True):
        wrong.append("the hand-off's tokens are not those of one engine")
    return wrong


def _tell(outcome: Outcome) -> None:
    said = outcome.error if outcome.figures is None else json.dumps(outcome.figures)
    print(f"== {outcome.step.name}, {outcome.seconds:.0f} s: {said}", flush=True)


def main() -> int:
    names = tuple(step.name for step in STEPS)
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--step", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_worker_environment(NUM_THREADS, interprets=options.device == "interpreter")
    if options.step is not None:
        with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
            options.json.write_text(json.dumps(run_step(options.step, options.device, Path(folder))))
        return 0
    outcomes = run_steps(tuple(options.only), options.device, _tell)
    figures = {each.step.name: each.figures for each in outcomes if each.figures is not None}
    ratios = ratios_of(figures) if options.device == "cuda" else []
    wrong = wrong_results(figures)
    failed = [each.step.name for each in outcomes if each.figures is None and each.step.is_essential]
    if options.json is not None:
        told = {
            "machine": platform.platform(),
            "steps": {each.step.name: each.figures or {"error": each.error} for each in outcomes},
            "seconds": {each.step.name: each.seconds for each in outcomes},
            "wrong": wrong,
            "failed": failed,
            "ratios": as_json(ratios),
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    for line in (*wrong, *(f"step {name} failed" for name in failed)):
        print(line)
    return show(ratios) or int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
