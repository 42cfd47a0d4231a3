"""Runs what the command line of ``baton plan`` asks for (baton/plan_parser.py)."""

import argparse
import itertools
import json
from pathlib import Path

from bench.client.command import parse_lengths
from bench.client.figures import Objective
from bench.client.scripts import Script
from bench.client.shapes import SHAPES, Shape
from bench.client.traces import clipped, read_trace
from bench.sizing import tell
from bench.sizing.plan import make_plan, verify
from bench.sizing.profile import Profile, read_profile
from core.errors import ConfigError

_NUM_DRAWN = 1000


def plan(options: argparse.Namespace) -> int:
    profile = _profile(options)
    objective = Objective.parse(options.slo)
    if not objective.is_any:
        raise ConfigError("a plan needs objectives: add --slo ttft=1,tpot=50ms")
    if max(objective.itl_s, objective.e2e_s) < float("inf"):
        raise ConfigError("a plan knows TTFT and TPOT alone: leave itl and e2e out of --slo")
    scripts = _scripts(options)
    found = make_plan(
        profile,
        scripts,
        objective,
        num_workers=options.gpus,
        rate=options.rate,
        share=options.share,
        counts_cache=options.cache,
    )
    if options.verify:
        found = verify(found, profile, scripts, number=options.verify_requests, everything=options.verify == "all")
    print(tell.markdown(found, profile), end="")
    for path, text in (
        (options.plot, tell.picture(found)),
        (options.values, tell.values(found, options.model or profile.model or "MODEL")),
        (options.json, json.dumps(tell.as_json(found), indent=2) + "\n"),
    ):
        if path is not None:
            _write(path, text)
    return 0


def _profile(options: argparse.Namespace) -> Profile:
    profile = read_profile(options.profile)
    given = {
        "num_kv_tokens": options.kv_tokens,
        "max_sequences": options.max_sequences,
        "max_step_tokens": options.max_step_tokens,
        "max_mixed_tokens": options.max_mixed_tokens,
    }
    return profile.model_copy(update={name: value for name, value in given.items() if value is not None})


def _scripts(options: argparse.Namespace) -> list[Script]:
    if options.trace is not None:
        scripts = read_trace(options.trace)
    else:
        shape = Shape(
            prompt=parse_lengths(options.prompt_tokens), answer=parse_lengths(options.answer_tokens), seed=options.seed
        )
        scripts = list(itertools.islice(SHAPES[options.workload](shape), _NUM_DRAWN))
    return clipped(scripts, longest=options.longest) if options.longest else scripts


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
