"""The command line: ``baton up``, ``chat``, ``bench``, ``profile``, ``plan``, ``status``, ``explain``, ``trace``,
``top``, ``scale``, ``drain``, ``flip``, ``rollout``, ``certs``, ``doctor``, ``keys``, ``config``; and ``router``,
``gateway``, ``worker``, ``place``: one process of a cell, where no launcher of ours runs.

Exit codes: 0 done, 1 it failed while running, 2 it cannot run as asked (the line says what to change), 130 interrupted.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.bench_parser import add_bench_parser
from baton.keys_parser import add_keys_parser
from baton.plan_parser import add_plan_parser, add_profile_parser
from baton.process import add_component_arguments, run_component
from core.config import ClusterConfig, dump_config, load_config, read_secret
from core.credentials import Credentials, open_credentials
from core.errors import ConfigError, ServingError
from core.security_config import Identity
from deploy.launcher import ERROR_PREFIX, EXIT_CONFIG, EXIT_FAILED

EXIT_INTERRUPTED = 130
COMPONENTS = {
    "router": "run a cell's router (containers, systemd; `up` starts all by itself)",
    "gateway": "run one gateway",
    "worker": "run one worker",
}
Command = Callable[[argparse.Namespace, ClusterConfig], int]


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    run: Command = options.run
    try:
        return run(options, load_config(options.config, overrides=options.set))
    except ConfigError as error:
        return fail(error.message, EXIT_CONFIG)
    except ServingError as error:
        return fail(error.message, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; nothing is left to say
        return EXIT_FAILED


def fail(message: str, code: int) -> int:
    """One line on standard error, whatever the message was."""
    print(ERROR_PREFIX + " ".join(message.split()), file=sys.stderr)
    return code


def _component(options: argparse.Namespace, config: ClusterConfig) -> int:
    run_component(options, config)
    return 0


def _up(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.up import up

    if options.launcher is not None:
        launcher = config.launcher.model_copy(update={"kind": options.launcher})
        config = config.model_copy(update={"launcher": launcher})
    return up(config, log_dir=options.log_dir)


def _place(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.place import place

    return place(config)


def _chat(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.chat import API_KEY, chat

    key = read_secret(API_KEY, options.key_file)
    url = options.url or config.gateway.url
    settings = {"model": options.model, "max_tokens": options.max_tokens, "temperature": options.temperature}
    return asyncio.run(chat(url, options.message, key=key, **settings))


def _status(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.status import show_status

    return asyncio.run(
        show_status(options.router or config.router.address, as_json=options.json, credentials=_credentials(config))
    )


def _scale(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.pools import scale

    address = options.router or config.router.address
    return asyncio.run(
        scale(address, options.model, options.size, wait_s=_wait_s(options), credentials=_credentials(config))
    )


def _drain(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.pools import drain

    address = options.router or config.router.address
    return asyncio.run(
        drain(address, options.worker, reason=options.reason, wait_s=_wait_s(options), credentials=_credentials(config))
    )


def _flip(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.pools import flip

    address = options.router or config.router.address
    return asyncio.run(
        flip(address, options.worker, reason=options.reason, wait_s=_wait_s(options), credentials=_credentials(config))
    )


def _rollout_start(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.rollout import start

    address = options.router or config.router.address
    return asyncio.run(
        start(
            address,
            config,
            options.model or config.models[0].name,
            revision=options.revision,
            wait_s=_wait_s(options),
            credentials=_credentials(config),
        )
    )


def _rollout_status(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.rollout import show

    address = options.router or config.router.address
    return asyncio.run(show(address, as_json=options.json, credentials=_credentials(config)))


def _certs(options: argparse.Namespace, config: ClusterConfig) -> int:
    from core.made_certificates import make_certificates

    written = make_certificates(Path(options.folder), domain=config.security.domain)
    print("\n".join(map(str, written)) if written else f"{options.folder} has all of them, and none ends soon")
    return 0


def _credentials(config: ClusterConfig) -> Credentials | None:
    """The operator's, by which a cluster with TLS lets us in."""
    return open_credentials(config.security, Identity.OPERATOR)


def _wait_s(options: argparse.Namespace) -> float:
    return float(options.timeout) if options.wait else 0.0


def _explain(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.explain import explain

    return asyncio.run(
        explain(
            options.router or config.router.address,
            options.request_id,
            as_json=options.json,
            credentials=_credentials(config),
        )
    )


def _trace(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.trace import show_trace

    return asyncio.run(
        show_trace(
            options.router or config.router.address,
            options.request_id,
            as_json=options.json,
            credentials=_credentials(config),
        )
    )


def _top(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.top import show_top

    if not options.interval > 0:
        raise ConfigError(f"--interval {options.interval:g} is no pause: give seconds above 0")
    router = options.router or config.router.address
    return asyncio.run(
        show_top(router, interval_s=options.interval, num_looks=options.looks, credentials=_credentials(config))
    )


def _doctor(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.checkup import check_all

    return asyncio.run(
        check_all(
            config, options.router or config.router.address, as_json=options.json, credentials=_credentials(config)
        )
    )


def _doctor_pair(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.doctor import check_pair

    router = options.router or config.router.address
    return asyncio.run(
        check_pair(router, options.prefill, options.decode, as_json=options.json, credentials=_credentials(config))
    )


def _config_show(options: argparse.Namespace, config: ClusterConfig) -> int:
    print(dump_config(config), end="")
    return 0


def _config_check(options: argparse.Namespace, config: ClusterConfig) -> int:
    from modelfiles.model import open_model

    for model in config.models:
        open_model(model.path)
    print("the configuration is good")
    return 0


def parser() -> argparse.ArgumentParser:
    """Every command and its arguments."""
    top = argparse.ArgumentParser(prog="baton", description="A disaggregated prefill/decode serving cluster.")
    top.add_argument("--version", action="version", version=f"baton {installed_version()}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="YAML file; without it the defaults hold")
    common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. gateway.listen=127.0.0.1:80"
    )

    up = commands.add_parser("up", parents=[common], help="start a cluster and keep it running until Ctrl-C")
    up.add_argument("--launcher", choices=["ray", "process"], help="default: launcher.kind of the configuration")
    up.add_argument("--log-dir", metavar="DIR", help="keep the logs of all processes here")
    up.set_defaults(run=_up)

    placer = commands.add_parser(
        "place", parents=[common], help="keep a cell's pools at their sizes; its router and gateways run elsewhere"
    )
    placer.set_defaults(run=_place)

    for kind, text in COMPONENTS.items():
        component = commands.add_parser(kind, parents=[common], help=text)
        add_component_arguments(component, kind)
        component.set_defaults(run=_component, kind=kind)

    chat = commands.add_parser("chat", parents=[common], help="ask a question, see the answer and where the time went")
    chat.add_argument("message")
    chat.add_argument("--model", help="default: the first model that the gateway serves")
    chat.add_argument("--max-tokens", type=int, default=256)
    chat.add_argument("--temperature", type=float, default=0, help="default: 0, always the likeliest token")
    chat.add_argument("--key-file", metavar="FILE", help="holds an API key; default: the environment's BATON_API_KEY")
    chat.add_argument("--url", help="default: the gateway of the configuration")
    chat.set_defaults(run=_chat)

    status = commands.add_parser("status", parents=[common], help="pools, workers and gateways of a running cluster")
    status.add_argument("--json", action="store_true")
    status.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    status.set_defaults(run=_status)

    explain = commands.add_parser(
        "explain", parents=[common], help="why a finished request went where it did: predictions beside what happened"
    )
    explain.add_argument("request_id", help="the x-request-id of its answer, or the id in the answer's body")
    explain.add_argument("--json", action="store_true")
    explain.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    explain.set_defaults(run=_explain)

    trace = commands.add_parser(
        "trace", parents=[common], help="the life of a finished request on a time axis, transfer of its KV included"
    )
    trace.add_argument("request_id", help="the x-request-id of its answer, or the id in the answer's body")
    trace.add_argument("--json", action="store_true")
    trace.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    trace.set_defaults(run=_trace)

    _add_pool_parsers(commands, common)

    live_view = commands.add_parser("top", parents=[common], help="pools, workers, rates and latencies, live")
    live_view.add_argument("--interval", type=float, default=1, metavar="S", help="default: 1")
    live_view.add_argument("--looks", type=int, default=0, metavar="N", help="end after so many; default: never")
    live_view.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    live_view.set_defaults(run=_top)

    doctor_all = commands.add_parser(
        "doctor", parents=[common], help="look at configuration, ports, transports, GPU, clock and every live pair"
    )
    doctor_all.add_argument("--json", action="store_true")
    doctor_all.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    doctor_all.set_defaults(run=_doctor)
    doctor = doctor_all.add_subparsers(metavar="COMMAND", required=False)
    pair = doctor.add_parser(
        "pair", parents=[common], help="handshake, canary and bandwidth of the links between two live workers"
    )
    pair.add_argument("prefill", metavar="P", help="the prefill worker's id, as `baton status` shows it")
    pair.add_argument("decode", metavar="D", help="the decode worker's id")
    pair.add_argument("--json", action="store_true")
    pair.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    pair.set_defaults(run=_doctor_pair)

    add_bench_parser(commands, common)
    certs = commands.add_parser("certs", parents=[common], help="make a CA and a certificate for each kind of process")
    certs.add_argument("folder", metavar="FOLDER", help="what it has already and does not end soon is kept")
    certs.set_defaults(run=_certs)

    add_profile_parser(commands, common)
    add_plan_parser(commands, common)
    add_keys_parser(commands, common)

    config = commands.add_parser("config", help="show or check a configuration").add_subparsers(
        metavar="COMMAND", required=True
    )
    show = config.add_parser("show", parents=[common], help="print the effective configuration as YAML")
    show.set_defaults(run=_config_show)
    check = config.add_parser("check", parents=[common], help="check keys, values and model files")
    check.set_defaults(run=_config_check)
    return top


def _add_pool_parsers(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", common: argparse.ArgumentParser
) -> None:
    live = argparse.ArgumentParser(add_help=False)
    live.add_argument("--wait", action="store_true", help="until it is done; says how far it is")
    live.add_argument("--timeout", type=float, default=600, metavar="S", help="of --wait; default: 600")
    live.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("worker", metavar="WORKER", help="its id, as `baton status` shows it")
    named.add_argument("--reason", default="", metavar="TEXT", help="for the log")

    scale = commands.add_parser("scale", parents=[common, live], help="change the sizes of a model's pools")
    scale.add_argument("model", metavar="MODEL")
    scale.add_argument("size", nargs="+", metavar="ROLE=N", help="e.g. prefill=2 decode=3")
    scale.set_defaults(run=_scale)

    drain = commands.add_parser(
        "drain", parents=[common, live, named], help="let a worker finish and leave; its pool replaces it"
    )
    drain.set_defaults(run=_drain)

    flip = commands.add_parser(
        "flip", parents=[common, live, named], help="let a worker finish and take the other role; the sizes follow"
    )
    flip.set_defaults(run=_flip)

    _add_rollout_parsers(commands, common, live)


def _add_rollout_parsers(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    common: argparse.ArgumentParser,
    live: argparse.ArgumentParser,
) -> None:
    rollout = commands.add_parser("rollout", help="replace a model's workers, both roles in lockstep").add_subparsers(
        metavar="COMMAND", required=True
    )
    start = rollout.add_parser(
        "start", parents=[common, live], help="by workers of what --config and --set now say of the model"
    )
    start.add_argument("model", nargs="?", help="default: the first of the configuration")
    start.add_argument("--revision", default="", metavar="NAME", help="default: a digest of the model's section")
    start.set_defaults(run=_rollout_start)
    status = rollout.add_parser("status", parents=[common], help="what was asked for last, and how far it is")
    status.add_argument("--json", action="store_true")
    status.add_argument("--router", metavar="HOST:PORT", help="default: the router of the configuration")
    status.set_defaults(run=_rollout_status)


def installed_version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
