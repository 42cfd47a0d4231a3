"""Runs what the command line of ``baton bench`` asks for (baton/bench_parser.py)."""

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from bench.client.endpoint import Asking, Endpoint, Route, first_model
from bench.client.figures import Figures, Objective, figures
from bench.client.html import html_report
from bench.client.http import HttpClient
from bench.client.knee import find_knee
from bench.client.player import Player, Run, warm_up, watched
from bench.client.prompts import Ids, Words, single_token_words
from bench.client.scripts import Script, at, rescaled, salted
from bench.client.shapes import SHAPES, Shape, gamma_arrivals
from bench.client.tables import as_json, markdown
from bench.client.traces import clipped, read_trace, window
from bench.workloads import Lengths
from core.errors import ConfigError

_WARM_UP_SEED = 1 << 30
"""Of prompts that no measured request shares anything with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    run: Run
    found: Figures
    facts: dict[str, str]
    sweep: tuple[tuple[float, Figures], ...] = ()


async def bench(options: argparse.Namespace, *, url: str, key: str | None) -> int:
    """Measure, print, write. 0 when at least one request was answered and, where that is asked for, attainment is
    enough."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        client = HttpClient(url, headers=headers)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    try:
        outcome = await measure(options, client, url)
    finally:
        client.close()
    _write(options, outcome)
    if not outcome.found.num_ok:
        return 1
    return 0 if outcome.found.attainment >= options.require_attainment else 1


async def measure(options: argparse.Namespace, client: HttpClient, url: str) -> Outcome:
    objective = Objective.parse(options.slo)
    if options.knee and not objective.is_any:
        raise ConfigError("--knee needs objectives: add --slo ttft=500ms,tpot=50ms")
    model = options.model or await first_model(client)
    endpoint = Endpoint(client, _asking(options, model))
    if options.warmup:
        await warm_up(endpoint, list(itertools.islice(fixed_like(options), options.warmup)))
    scripts = load(options)
    sweep: list[tuple[float, Figures]] = []
    if options.knee:
        knee, outcome = await _knee(options, endpoint, scripts, objective, sweep)
    else:
        knee, run = None, await _play(options, endpoint, scripts)
        outcome = run, figures(run, objective)
    facts = {
        "server": url,
        "model": model,
        "endpoint": options.endpoint,
        "workload": _told(options, len(scripts)),
        "seed": str(options.seed),
        "warm-up": f"{options.warmup} requests, not measured",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    if knee is not None:
        facts["knee"] = f"{knee:.3g} conversations/s at {options.knee_attainment:.0%} attainment of {objective}"
    return Outcome(run=outcome[0], found=outcome[1], facts=facts, sweep=tuple(sweep))


async def _knee(
    options: argparse.Namespace,
    endpoint: Endpoint,
    scripts: Sequence[Script],
    objective: Objective,
    sweep: list[tuple[float, Figures]],
) -> tuple[float, tuple[Run, Figures]]:
    """The knee, and what was seen there (or at the lowest rate tried)."""
    runs: dict[float, tuple[Run, Figures]] = {}

    async def probe(rate: float) -> Figures:
        arriving = rescaled(scripts, rate=rate)
        if options.fresh:
            arriving = salted(arriving, str(len(runs)))
        run = await _play(options, endpoint, arriving)
        runs[rate] = run, figures(run, objective)
        print(f"rate {rate:.3g}/s: attainment {runs[rate][1].attainment:.1%}", file=sys.stderr)
        return runs[rate][1]

    knee, tried = await find_knee(probe, from_rate=_mean_rate(scripts), share=options.knee_attainment)
    sweep += tried
    return knee, runs[knee or min(runs)]


async def _play(options: argparse.Namespace, endpoint: Endpoint, scripts: Iterable[Script]) -> Run:
    player = Player(endpoint)
    watcher = asyncio.create_task(watched(player.run, _show)) if options.progress else None
    try:
        return await player.play(scripts, concurrency=options.concurrency)
    finally:
        if watcher is not None:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            print(file=sys.stderr)


def _show(run: Run) -> None:
    recent = [record for record in run.records[-200:] if record.is_ok]
    failed = sum(not record.is_ok for record in run.records)
    ttft = sorted(record.ttft_s for record in recent)
    told = f", TTFT p50 {1e3 * ttft[len(ttft) // 2]:.0f} ms" if ttft else ""
    passed_s = time.perf_counter() - run.started_at
    tokens = sum(record.num_completion_tokens for record in run.records)
    text = (
        f"{passed_s:6.0f} s  sent {run.num_sent}, running {run.num_running}, done {len(run.records)}, failed {failed}"
        f", {tokens / passed_s:.0f} tokens/s{told}"
    )
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<100}", end=end, file=sys.stderr, flush=True)


# -- what is asked ---------------------------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> list[Script]:
    """The workload, with its times."""
    if options.trace is not None:
        scripts = window(read_trace(options.trace), from_s=options.trace_from, duration_s=options.trace_duration)
        scripts = scripts[: options.requests] if options.requests_given else scripts
        if options.longest:
            scripts = clipped(scripts, longest=options.longest)
        if not scripts:
            raise ConfigError("no request of the trace begins within --trace-from and --trace-duration")
        if options.rate is not None:
            return rescaled(scripts, rate=options.rate)
        return [replace(script, at_s=script.at_s / options.speed) for script in scripts]
    rate = math.inf if options.rate is None else options.rate
    arrivals = gamma_arrivals(rate=rate, burstiness=options.burstiness, seed=options.seed)
    if options.duration is not None:
        if not math.isfinite(rate):
            raise ConfigError("--duration needs --rate: without one all requests are sent at once")
        arrivals = itertools.takewhile(lambda at_s: at_s < options.duration, arrivals)
    limit = options.requests if options.duration is None or options.requests_given else None
    scripts = list(itertools.islice(at(arrivals, SHAPES[options.workload](_shape(options))), limit))
    if not scripts:
        raise ConfigError("the workload has no request: raise --duration, --rate or --requests")
    return scripts


def fixed_like(options: argparse.Namespace) -> Iterator[Script]:
    """For warming up: of the workload's kind, with words of its own."""
    shape = replace(_shape(options), seed=options.seed + _WARM_UP_SEED)
    return SHAPES["random" if options.trace is not None else options.workload](shape)


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(
        prompt=parse_lengths(options.prompt_tokens),
        answer=parse_lengths(options.answer_tokens),
        seed=options.seed,
        shared=parse_lengths(options.shared_tokens),
        num_shared=options.shared_prefixes,
        turns=options.turns,
        think_s=options.think,
        long=parse_lengths(options.long_tokens),
        long_share=options.long_share,
    )


def parse_lengths(text: str) -> Lengths:
    """``512``, or ``512:0.6`` for a log-normal distribution of that median and sigma. Raises ConfigError."""
    median, _, sigma = text.partition(":")
    try:
        lengths = Lengths(median=float(median), sigma=float(sigma or 0.0))
    except ValueError:
        lengths = Lengths(median=0)
    if not (1 <= lengths.median < math.inf and 0 <= lengths.sigma <= 3):
        raise ConfigError(f"{text!r} is no length: write 512, or 512:0.6 for a median and a sigma (0 to 3)")
    return lengths


def _asking(options: argparse.Namespace, model: str) -> Asking:
    try:
        extra = orjson.loads(options.extra_body)
    except orjson.JSONDecodeError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body is not a JSON object: write for example '{\"top_k\": 20}'")
    return Asking(
        model=model,
        route=Route(options.endpoint),
        words=_words(options),
        is_exact=options.exact,
        extra=extra,
        timeout_s=options.timeout,
    )


def _words(options: argparse.Namespace) -> Words | Ids:
    if options.prompts == "ids":
        return Ids(seed=options.seed)
    if options.tokenizer is None:
        return Words(seed=options.seed)
    from modelfiles.model import open_model

    words = single_token_words(open_model(options.tokenizer).tokenizer().ordinary_texts.values())
    if not words:
        raise ConfigError(f"the vocabulary of {options.tokenizer} has too few plain words: leave --tokenizer out")
    return Words(words, seed=options.seed)


def _mean_rate(scripts: Sequence[Script]) -> float:
    span_s = max(script.at_s for script in scripts)
    if not span_s:
        raise ConfigError("--knee needs a rate to begin with: add --rate")
    return len(scripts) / span_s


def _told(options: argparse.Namespace, number: int) -> str:
    if options.trace is not None:
        pace = f"at {options.rate:g}/s" if options.rate is not None else f"at {options.speed:g} times its speed"
        what = f"trace {Path(options.trace).name}, {pace}"
    else:
        pace = "all at once" if options.rate is None else f"{options.rate:g}/s, burstiness {options.burstiness:g}"
        what = f"{options.workload}: prompts {options.prompt_tokens}, answers {options.answer_tokens} tokens, {pace}"
    clients = "" if options.concurrency is None else f", at most {options.concurrency} at once"
    return f"{number} conversations, {what}{clients}"


# -- what came of it -------------------------------------------------------------------------------------------------


def _write(options: argparse.Namespace, outcome: Outcome) -> None:
    table = markdown(outcome.facts, outcome.found, sweep=outcome.sweep)
    print(table, end="")
    if options.json is not None:
        content = as_json(outcome.facts, outcome.found, outcome.run, sweep=outcome.sweep)
        _write_file(options.json, json.dumps(content, indent=1) + "\n")
    if options.markdown is not None:
        _write_file(options.markdown, table)
    if options.html is not None:
        title = f"baton bench: {outcome.facts['model']}"
        _write_file(options.html, html_report(title, outcome.facts, outcome.found, outcome.run, sweep=outcome.sweep))


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
