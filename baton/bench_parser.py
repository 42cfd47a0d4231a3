"""The arguments of ``baton bench``. What it does is in :mod:`bench.client`, imported when it is asked for."""

import argparse
import asyncio
from pathlib import Path

from core.config import ClusterConfig, read_secret

DEFAULT_REQUESTS = 100


def add_bench_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", common: argparse.ArgumentParser
) -> None:
    bench = commands.add_parser(
        "bench",
        parents=[common],
        help="measure what clients of an OpenAI endpoint see: TTFT, TPOT, ITL, goodput",
        description="Sends a workload to any OpenAI endpoint and says what its clients saw.",
    )
    server = bench.add_argument_group("the server")
    server.add_argument("--url", help="default: the gateway of the configuration")
    server.add_argument("--model", help="default: the first one that the server lists")
    server.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    server.add_argument("--key-file", metavar="FILE", help="holds an API key; default: the environment's BATON_API_KEY")
    server.add_argument("--extra-body", metavar="JSON", default="{}", help="members to add to each request")
    server.add_argument("--timeout", type=positive, default=600, metavar="S", help="of one request; default: 600")

    what = bench.add_argument_group("what is asked (lengths in tokens: 512, or MEDIAN:SIGMA of a log-normal, 512:0.6)")
    what.add_argument(
        "--workload", choices=["fixed", "random", "shared-prefix", "chat", "mixed"], default="random",
        help="mixed: long prompts among short ones; chat: several turns behind shared beginnings",
    )  # fmt: skip
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay: Mooncake jsonl, Azure csv, BurstGPT csv [.gz]"
    )
    what.add_argument("--trace-from", type=float, default=0.0, metavar="S", help="begin so late in the trace")
    what.add_argument("--trace-duration", type=positive, default=float("inf"), metavar="S")
    what.add_argument("--longest", type=count, metavar="N", help="cut a trace's prompts so that they fit N tokens")
    what.add_argument("--requests", type=count, metavar="N", help=f"conversations; default: {DEFAULT_REQUESTS}, or all")
    what.add_argument("--prompt-tokens", default="512:0.6", metavar="L")
    what.add_argument("--answer-tokens", default="128:0.6", metavar="L")
    what.add_argument("--shared-tokens", default="1024", metavar="L", help="of the beginnings that prompts share")
    what.add_argument("--shared-prefixes", type=count, default=8, metavar="N", help="how many different ones there are")
    what.add_argument("--turns", type=_turns, default=(2, 5), metavar="A-B", help="of a chat; default: 2-5")
    what.add_argument("--think", type=float, default=1.0, metavar="S", help="mean pause of a user; default: 1")
    what.add_argument("--long-tokens", default="4096:0.3", metavar="L", help="of the long prompts of `mixed`")
    what.add_argument("--long-share", type=share, default=0.1, metavar="X", help="of all prompts; default: 0.1")
    what.add_argument("--prompts", choices=["text", "ids"], default="text", help="ids: exact lengths, where taken")
    what.add_argument("--tokenizer", metavar="MODEL", help="choose words that are one token each for this model")
    what.add_argument(
        "--no-exact", dest="exact", action="store_false", help="let answers end early: no ignore_eos, no min_tokens"
    )
    what.add_argument("--seed", type=int, default=0)

    when = bench.add_argument_group("when it is asked")
    when.add_argument("--rate", type=positive, metavar="R", help="conversations a second; default: all at once")
    when.add_argument("--burstiness", type=positive, default=1.0, metavar="X", help="1: Poisson; less: in bursts")
    when.add_argument("--duration", type=positive, metavar="S", help="send for so long")
    when.add_argument("--speed", type=positive, default=1.0, metavar="X", help="of a trace; default: 1, as it was")
    when.add_argument("--concurrency", type=count, metavar="N", help="at most so many at once (closed loop)")
    when.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before it, not measured; default: 2")

    told = bench.add_argument_group("what is told")
    told.add_argument("--slo", action="append", default=[], metavar="X=T,..", help="ttft=500ms,tpot=0.05,itl=..,e2e=..")
    told.add_argument("--require-attainment", type=share, default=0.0, metavar="X", help="exit 1 below this share")
    told.add_argument("--knee", action="store_true", help="search the highest rate that meets the objectives")
    told.add_argument(
        "--knee-attainment", type=share, default=0.9, metavar="X", help="what meeting means; default: 0.9"
    )
    told.add_argument(
        "--same-words", dest="fresh", action="store_false", help="let the probes of --knee find each other's cache"
    )
    told.add_argument("--json", type=Path, metavar="FILE", help="all figures, with the names of `vllm bench serve`")
    told.add_argument("--markdown", type=Path, metavar="FILE", help="the table")
    told.add_argument("--html", type=Path, metavar="FILE", help="a report with plots, in one file")
    told.add_argument("--no-progress", dest="progress", action="store_false")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace, config: ClusterConfig) -> int:
    import uvloop

    from baton.chat import API_KEY
    from bench.client.command import bench

    options.requests_given = options.requests is not None
    options.requests = options.requests or DEFAULT_REQUESTS
    key = read_secret(API_KEY, options.key_file)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bench(options, url=options.url or config.gateway.url, key=key))


def positive(text: str) -> float:
    return _within(text, float(text) > 0, "more than 0")


def share(text: str) -> float:
    return _within(text, 0 <= float(text) <= 1, "a share, 0 to 1")


def _within(text: str, is_good: bool, wanted: str) -> float:
    if not is_good:
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return float(text)


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _turns(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    turns = count(least), count(most or least)
    if turns[0] > turns[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is the smaller one")
    return turns
