"""The arguments of ``baton profile`` and ``baton plan``. What they do is in :mod:`bench.sizing`, imported when it is
asked for."""

import argparse
import asyncio
from pathlib import Path

from baton.bench_parser import count, positive, share
from core.config import ClusterConfig, read_secret
from core.credentials import open_credentials
from core.security_config import Identity


def add_profile_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", common: argparse.ArgumentParser
) -> None:
    profile = commands.add_parser(
        "profile",
        parents=[common],
        help="measure what a worker's prompts, steps and hand-offs take, for `baton plan`",
        description="Measures a live cluster that has one worker of each role and nothing else to do. "
        "With a prefill worker, run it with --set router.mode=split, so that every prompt is handed off.",
    )
    profile.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the profile goes")
    profile.add_argument("--url", help="default: the gateway of the configuration")
    profile.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    profile.add_argument("--no-router", action="store_true", help="measure as a client alone, of any server")
    profile.add_argument("--handoff", action="store_true", help="with --no-router: prompts are read elsewhere")
    profile.add_argument("--model", help="default: the first one that the server lists")
    profile.add_argument(
        "--key-file", metavar="FILE", help="holds an API key; default: the environment's BATON_API_KEY"
    )
    profile.add_argument("--longest", type=count, default=2048, metavar="N", help="prompt; default: 2048")
    profile.add_argument("--batches", type=count, default=32, metavar="N", help="largest batch; default: 32")
    profile.add_argument("--repeats", type=count, default=5, metavar="N", help="of each figure; default: 5")
    profile.add_argument("--prompts", choices=["text", "ids"], default="ids", help="text, where ids are not taken")
    profile.add_argument("--hardware", default="", help="what people should read in it")
    profile.add_argument("--seed", type=int, default=0, help="another one finds nothing of the last run cached")
    profile.set_defaults(run=_profile)


def add_plan_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", common: argparse.ArgumentParser
) -> None:
    plan = commands.add_parser(
        "plan",
        parents=[common],
        help="how many prefill and decode workers, or whether not to split at all",
        description="From a profile, a demand and objectives: what each split serves, and the same hardware unsplit.",
    )
    plan.add_argument("--profile", type=Path, required=True, metavar="FILE", help="of `baton profile`, or a cost table")
    plan.add_argument("--slo", action="append", default=[], metavar="X=T,..", help="e.g. ttft=1.5,tpot=25ms")
    plan.add_argument("--share", type=share, default=0.95, metavar="X", help="of requests to meet it; default: 0.95")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpus", type=count, metavar="N", help="workers that there are")
    size.add_argument("--rate", type=positive, metavar="R", help="requests a second: the fewest workers that serve it")

    demand = plan.add_argument_group("what is asked (lengths in tokens: 512, or MEDIAN:SIGMA)")
    demand.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake jsonl, Azure csv, BurstGPT csv [.gz]")
    demand.add_argument("--prompt-tokens", default="2000:0.8", metavar="L")
    demand.add_argument("--answer-tokens", default="200:0.6", metavar="L")
    demand.add_argument("--workload", choices=["random", "shared-prefix", "chat", "mixed"], default="random")
    demand.add_argument("--longest", type=count, metavar="N", help="cut requests that are longer")
    demand.add_argument("--no-cache", dest="cache", action="store_false", help="count nothing of prompts as cached")
    demand.add_argument("--seed", type=int, default=0)

    worker = plan.add_argument_group("what a worker is, where the profile does not say it")
    worker.add_argument("--kv-tokens", type=count, metavar="N", help="tokens of KV that it holds")
    worker.add_argument("--max-sequences", type=count, metavar="N")
    worker.add_argument("--max-step-tokens", type=count, metavar="N")
    worker.add_argument("--max-mixed-tokens", type=count, metavar="N")

    told = plan.add_argument_group("what is told")
    told.add_argument(
        "--verify", nargs="?", const="best", choices=["best", "all"], help="simulate the best and their like, or all"
    )
    told.add_argument(
        "--verify-requests", type=count, default=400, metavar="N", help="of each simulation; default: 400"
    )
    told.add_argument("--plot", type=Path, metavar="FILE", help="SVG: rates over the number of prefill workers")
    told.add_argument("--values", type=Path, metavar="FILE", help="a fragment of Helm values")
    told.add_argument("--model", help="its name in the fragment; default: the profile's")
    told.add_argument("--json", type=Path, metavar="FILE")
    plan.set_defaults(run=_plan)


def _profile(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.chat import API_KEY
    from bench.sizing.profile_command import profile

    key = read_secret(API_KEY, options.key_file)
    url, router = options.url or config.gateway.url, options.router or config.router.address
    credentials = open_credentials(config.security, Identity.OPERATOR)
    return asyncio.run(profile(options, url=url, router=router, key=key, credentials=credentials))


def _plan(options: argparse.Namespace, config: ClusterConfig) -> int:
    from bench.sizing.command import plan

    return plan(options)
