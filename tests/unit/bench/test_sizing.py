"""Sizing: laws are fitted or refused, formulas say what queues do, and a plan says what they mean."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from baton.cli import main
from bench.client.figures import Objective
from bench.client.record import Record
from bench.client.scripts import Line, Part, Script
from bench.client.shapes import Shape, random_lengths
from bench.client.traces import read_trace
from bench.sizing import tell
from bench.sizing.demand import Demand
from bench.sizing.fit import Measured, fit
from bench.sizing.measure import Sizes, measure
from bench.sizing.model import Model, Split, Stage, _erlang_c
from bench.sizing.plan import make_plan, verify
from bench.sizing.profile import read_profile
from bench.sizing.simulate import at_rate, simulate
from bench.workloads import Lengths
from core.costs import HandoffCosts, StepCosts, StepWork
from core.errors import ConfigError, InternalError

BENCH = Path(__file__).parents[3] / "bench"
H200 = read_profile(BENCH / "profiles" / "qwen3-8b-h200-computed.json")


def scripts(prompt: float, answer: float, *, sigma: float = 0.6, number: int = 400) -> list[Script]:
    shape = Shape(prompt=Lengths(median=prompt, sigma=sigma), answer=Lengths(median=answer, sigma=sigma))
    return list(itertools.islice(random_lengths(shape), number))


def script(*parts: tuple[str, int], answer: int = 4) -> Script:
    return Script(lines=(Line(parts=tuple(Part(key=key, num_tokens=n) for key, n in parts), max_tokens=answer),))


def test_what_was_said_before_is_cached() -> None:
    again = [script(("a", 32), ("b", 32)), script(("a", 32), ("c", 40)), script(("x", 8), ("b", 32))]
    demand = Demand.of(again, block_size=16)
    assert demand.cached.tolist() == [0, 32, 0], "a part counts behind the same beginning alone"
    assert Demand.of([again[0], again[0]], block_size=16).cached.tolist() == [0, 48], "the last token is always read"
    turns = Script(lines=(Line(parts=(Part(key="a", num_tokens=32),), max_tokens=16),) * 2)
    assert Demand.of([turns], block_size=16).prompts.tolist() == [32, 80]
    assert Demand.of([turns], block_size=16).cached.tolist() == [0, 48], "and so are answers"


@pytest.mark.parametrize(("servers", "offered", "waits"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.409)])
def test_who_waits_is_erlangs(servers: int, offered: float, waits: float) -> None:
    assert _erlang_c(servers, offered) == pytest.approx(waits, abs=1e-3)


def test_rates_grow_with_the_side_that_limits_and_with_no_other() -> None:
    model = Model(H200, Demand.of(scripts(3000, 200), block_size=64), Objective(ttft_s=1.0, tpot_s=0.02))
    rates = {(p, d): model.best_rate(Split(prefill=p, decode=d), 0.9) for p in range(1, 5) for d in range(1, 5)}
    for (prefill, decode), (rate, stage) in rates.items():
        if prefill > 1:
            assert rate >= rates[prefill - 1, decode][0] * 0.999
        if decode > 1:
            assert rate >= rates[prefill, decode - 1][0] * 0.999
        if stage is Stage.PREFILL and decode < 4:
            assert rates[prefill, decode + 1][0] < 1.1 * rate, "more decode workers do nothing for prompts"


def test_looser_objectives_serve_no_less_and_impossible_ones_nothing() -> None:
    demand = Demand.of(scripts(3000, 200), block_size=64)
    for split in (Split(prefill=2, decode=2), Split(unified=4)):
        rates = [
            Model(H200, demand, Objective(ttft_s=ttft_s, tpot_s=tpot_s)).best_rate(split, 0.9)[0]
            for ttft_s, tpot_s in ((0.01, 0.02), (1.0, 0.001), (0.5, 0.01), (1.0, 0.02), (5.0, 0.1))
        ]
        assert rates[:2] == [0.0, 0.0] and 0 < rates[2] <= rates[3] <= rates[4]


def measured(costs: StepCosts, first_s: float, *, noise: float = 0.0) -> Measured:
    choose = random.Random(1)

    def noisy(seconds: float) -> float:
        return seconds * math.exp(noise * choose.gauss(0, 1))

    def prompt_s(n: int) -> float:
        return costs.step_s(StepWork(num_prompt_tokens=n, num_prompt_pairs=n * (n + 1) // 2))

    def step_s(rows: int, context: int) -> float:
        return costs.step_s(StepWork(num_decode_rows=rows, num_decode_positions=rows * context))

    lengths, handoff = (16, 32, 64, 128, 256, 512, 1024, 2048), costs.handoff or HandoffCosts()
    return Measured(
        prompts=[(n, noisy(first_s + prompt_s(n))) for n in lengths],
        steps=[
            (rows, context, noisy(step_s(rows, context))) for context in (40, 1000) for rows in (1, 2, 4, 8, 16, 32)
        ],
        gaps=[(n, noisy(step_s(1, n) + handoff.fixed_s + handoff.token_s * n)) for n in lengths],
    )


COSTS = StepCosts.linear(
    fixed_s=0.01,
    prompt_token_s=1e-4,
    decode_row_s=4e-4,
    prompt_pair_s=2e-8,
    decode_position_s=5e-7,
    handoff=HandoffCosts(fixed_s=0.004, token_s=5e-6),
)


def test_a_law_is_found_again_from_what_it_makes() -> None:
    laws = fit(measured(COSTS, 0.005, noise=0.01), where="here")
    for work in (
        StepWork(num_prompt_tokens=300, num_prompt_pairs=45_150),
        StepWork(num_decode_rows=12, num_decode_positions=6000),
    ):
        assert laws.costs.step_s(work) == pytest.approx(COSTS.step_s(work), rel=0.08)
    assert laws.first_s == pytest.approx(0.005, abs=0.002)
    assert laws.costs.handoff is not None and laws.costs.handoff.token_s == pytest.approx(5e-6, rel=0.3)
    assert [each.name for each in laws.fits] == ["prompts", "decode steps", "transfers"]


def test_a_bad_fit_is_refused_by_name() -> None:
    with pytest.raises(InternalError, match="decode steps do not follow their law"):
        fit(measured(COSTS, 0.005, noise=1.0), where="here")


class Timed:
    """An endpoint whose times are those of a law: what was cached is read in no time."""

    def __init__(self, costs: StepCosts, first_s: float) -> None:
        self.costs, self.first_s = costs, first_s
        self.seen: set[str] = set()
        self.running: dict[object, int] = {}

    def body(self, script: Script, line: int, said: object) -> bytes:
        self.running[script] = self.running.get(script, 0) + 1
        return b""

    async def ask(self, script: Script, line: int, body: bytes, *, due_at: float) -> Record:
        await asyncio.sleep(0)  # all of a batch have come
        (part,), rows = script.lines[0].parts, self.running[script]
        new = 1 if part.key in self.seen else part.num_tokens
        self.seen.add(part.key)
        work = StepWork(num_prompt_tokens=new, num_prompt_pairs=new * (new + 1) // 2)
        at = self.first_s + self.costs.step_s(work)
        times = [at]
        handoff = self.costs.handoff or HandoffCosts()
        for index in range(1, script.lines[0].max_tokens):
            work = StepWork(num_decode_rows=rows, num_decode_positions=rows * (part.num_tokens + index))
            at += self.costs.step_s(work) + (handoff.fixed_s + handoff.token_s * new if index == 1 else 0.0)
            times.append(at)
        return Record(times=times, num_completion_tokens=len(times))


async def test_what_is_measured_of_a_law_is_the_law() -> None:
    sizes = Sizes.within(max_step_tokens=2048, max_sequences=16, max_context=4096, repeats=2)
    assert len(sizes.prompts) == 8 and sizes.batches == [1, 2, 4, 8, 16]
    laws = fit(await measure(Timed(COSTS, 0.005), sizes, has_handoff=True), where="here")  # type: ignore[arg-type]
    work = StepWork(num_decode_rows=12, num_decode_positions=6000)
    assert laws.costs.step_s(work) == pytest.approx(COSTS.step_s(work), rel=0.03)
    assert laws.costs.handoff is not None
    assert laws.costs.handoff.fixed_s == pytest.approx(0.004, abs=0.001)


def test_profiles_are_read_or_named_as_none(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(H200.model_dump_json())
    assert read_profile(path) == H200
    path.write_text(COSTS.model_dump_json())
    assert read_profile(path).costs == COSTS, "a cost table alone"
    path.write_text('{"costs": 3}')
    for bad in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="baton profile --out"):
            read_profile(bad)


def test_the_code_trace_is_not_to_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(H200.model_dump_json())
    files = [f"--{name}={tmp_path / name}" for name in ("json", "plot", "values")]
    trace = BENCH / "traces" / "azure_2023_code_1500.csv.gz"
    arguments = ["--profile", str(profile), "--slo", "ttft=1,tpot=20ms", "--trace", str(trace), "--gpus", "8"]
    assert main(["plan", *arguments, "--share", "0.9", *files]) == 0
    told = capsys.readouterr().out
    assert "**Do not split.** 8 unified serve" in told and "The ratio of mean rates says 7P1D" in told
    found = json.loads((tmp_path / "json").read_text())
    assert found["best"] == "8 unified" and not found["is_split"] and len(found["sensitivity"]) == 4
    assert "unified: {replicas: 8}" in (tmp_path / "values").read_text()
    assert (tmp_path / "plot").read_text().startswith("<svg")


def test_the_fewest_workers_that_serve_a_rate() -> None:
    demand, objective = scripts(6000, 200), Objective(ttft_s=1.5, tpot_s=0.01)
    plan = make_plan(H200, demand, objective, rate=12.0, share=0.9)
    assert plan.best.rate >= 12.0
    fewer = make_plan(H200, demand, objective, num_workers=plan.num_workers - 1, share=0.9)
    assert fewer.best.rate < 12.0, "one less does not"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_workers": 1}, "two workers at least"),
        ({"num_workers": 8, "objective": Objective(ttft_s=0.001)}, "no split meets"),
        ({"rate": 1e9}, "no 1024 workers"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: dict[str, object], said: str) -> None:
    objective = arguments.pop("objective", Objective(ttft_s=1.0, tpot_s=0.02))
    with pytest.raises(ConfigError, match=said):
        make_plan(H200, scripts(3000, 200), objective, **arguments)  # type: ignore[arg-type]


def test_a_request_that_no_worker_holds_is_named() -> None:
    with pytest.raises(ConfigError, match="does not fit into a worker"):
        make_plan(H200.model_copy(update={"num_kv_tokens": 500}), scripts(900, 10), Objective(ttft_s=1), num_workers=2)


def test_a_simulation_is_a_function_of_its_seed_and_spares_no_request() -> None:
    demand = at_rate(scripts(800, 40, number=60), 20.0, number=80)
    runs = [simulate(H200, split, demand, seed=3) for split in (Split(prefill=1, decode=1),) * 2 + (Split(unified=2),)]
    assert runs[0] == runs[1] and all(len(run.samples) == 80 for run in runs)
    assert {sample.mode for sample in runs[0].samples} == {"split"}
    assert {sample.mode for sample in runs[2].samples} == {"local"}
    for asked, sample in zip(demand, runs[0].samples, strict=True):
        assert len(sample.answer) == asked.lines[0].max_tokens


def test_what_is_verified_is_judged_by_simulation() -> None:
    demand, objective = scripts(3000, 60, number=100), Objective(ttft_s=1.0, tpot_s=0.02)
    plan = make_plan(H200, demand, objective, num_workers=2, share=0.9)
    checked = verify(plan, H200, demand, number=40, horizon_s=2.0)
    row = checked.rows[0]
    assert row.simulated is not None and checked.unified.simulated is not None
    assert checked.best.known_rate == max(row.simulated, checked.unified.simulated)
    assert "simulated" in tell.verdict(checked) and tell.picture(checked).count("<path") > 5


def test_the_excerpts_are_traces() -> None:
    for path in (BENCH / "traces").glob("*.gz"):
        assert len(read_trace(path)) > 300
