"""Figures for people (Markdown) and for programs (JSON with the names that `vllm bench serve` uses)."""

import math
from collections.abc import Mapping, Sequence

from bench.client.figures import DEFINITIONS, PERCENTILES, Figures, Spread
from bench.client.player import Run

Facts = Mapping[str, str]
"""What was run, for the reader: the server, the workload, the seed."""
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def markdown(facts: Facts, found: Figures, *, sweep: Sequence[tuple[float, Figures]] = ()) -> str:
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| | mean | " + " | ".join(f"p{p}" for p in PERCENTILES) + " |", "| --- |" + " ---: |" * 5]
    lines += [
        f"| {_NAMES[name]} (ms) | {_ms(spread.mean)} | "
        + " | ".join(_ms(spread.percentiles[p]) for p in PERCENTILES)
        + " |"
        for name, spread in spreads(found).items()
    ]
    lines += ["", "| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in totals(found))]
    if sweep:
        lines += ["", *_sweep_table(sweep)]
    lines += ["", *(f"- {name}: {meaning}." for name, meaning in DEFINITIONS.items())]
    return "\n".join(lines) + "\n"


def _sweep_table(sweep: Sequence[tuple[float, Figures]]) -> list[str]:
    rows = [
        f"| {rate:.3g} | {each.attainment:.1%} | {each.goodput:.3g} | {_ms(each.ttft.median)} | "
        f"{_ms(each.ttft.percentiles[99])} | {_ms(each.tpot.median)} | {_ms(each.tpot.percentiles[99])} |"
        for rate, each in sorted(sweep, key=lambda pair: pair[0])
    ]
    head = "| rate (1/s) | attainment | goodput | TTFT p50 (ms) | TTFT p99 | TPOT p50 (ms) | TPOT p99 |"
    return [head, "| ---: |" + " ---: |" * 6, *rows]


def spreads(found: Figures) -> dict[str, Spread]:
    return {"ttft": found.ttft, "tpot": found.tpot, "itl": found.itl, "e2e": found.e2e}


def totals(found: Figures) -> list[tuple[str, str]]:
    failed = ", ".join(f"{number} {name}" for name, number in found.errors.items())
    rows = [
        ("requests answered", f"{found.num_ok} of {found.num_requests}"),
        *([("failed", failed)] if failed else []),
        ("duration", f"{found.duration_s:.2f} s"),
        ("requests a second", f"{found.request_rate:.3f}"),
        ("tokens of answers a second", f"{found.output_rate:.1f}"),
        ("tokens in and out a second", f"{found.total_rate:.1f}"),
        ("prompt tokens cached", f"{found.num_cached_tokens / max(1, found.num_prompt_tokens):.1%}"),
        ("tokens in an event", f"{found.tokens_per_event:.2f}"),
        ("running at once, at most", str(found.max_running)),
        ("sent late by, p99", f"{_ms(found.lateness.percentiles[99])} ms"),
    ]
    if found.objective.is_any:
        rows += [
            ("objectives", str(found.objective)),
            ("attainment", f"{found.attainment:.1%}"),
            ("goodput", f"{found.goodput:.3f} requests/s"),
        ]
    return rows


def as_json(
    facts: Facts, found: Figures, run: Run, *, sweep: Sequence[tuple[float, Figures]] = ()
) -> dict[str, object]:
    """Everything, each request included."""
    result: dict[str, object] = {
        **facts,
        "duration": found.duration_s,
        "completed": found.num_ok,
        "failed": found.num_requests - found.num_ok,
        "total_input_tokens": found.num_prompt_tokens,
        "total_cached_tokens": found.num_cached_tokens,
        "total_output_tokens": found.num_completion_tokens,
        "request_throughput": found.request_rate,
        "request_goodput": found.goodput if found.objective.is_any else None,
        "slo_attainment": found.attainment if found.objective.is_any else None,
        "output_throughput": found.output_rate,
        "total_token_throughput": found.total_rate,
        "max_output_tokens_per_s": found.max_tokens_per_s,
        "max_concurrent_requests": found.max_running,
        "tokens_per_event": found.tokens_per_event,
        "input_lens": [record.num_prompt_tokens for record in run.records],
        "output_lens": [record.num_completion_tokens for record in run.records],
        "ttfts": [_number(record.ttft_s) for record in run.records],
        "itls": [record.itl_s for record in run.records],
        "start_times": [record.sent_at - run.started_at for record in run.records],
        "errors": [record.error for record in run.records],
    }
    for name, spread in spreads(found).items():
        vllm_name = "e2el" if name == "e2e" else name
        result |= {
            f"mean_{vllm_name}_ms": _number(1e3 * spread.mean),
            f"median_{vllm_name}_ms": _number(1e3 * spread.median),
            f"std_{vllm_name}_ms": _number(1e3 * spread.std),
            **{f"p{p}_{vllm_name}_ms": _number(1e3 * value) for p, value in spread.percentiles.items()},
        }
    if sweep:
        result["sweep"] = [
            {"request_rate": rate, "slo_attainment": each.attainment, "request_goodput": each.goodput}
            for rate, each in sweep
        ]
    return result


def _number(value: float) -> float | None:
    """JSON knows neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if math.isfinite(seconds) else "-"
