"""Entry point of every process of a cluster: ``python -m baton.process router|gateway|worker ...``, which launchers
start, and ``baton router|gateway|worker``, the same for platforms that place processes themselves.

Keeps the promises that a launcher relies on (:mod:`deploy.launcher`): one ready line, one error line, exit codes.
A component's own packages are imported late, after the environment of a worker is set: torch reads it once.
"""

import argparse
import asyncio
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from core.config import ClusterConfig, load_config, set_worker_environment
from core.errors import ConfigError, ServingError
from core.types import Role
from deploy.launcher import ERROR_PREFIX, EXIT_CONFIG, EXIT_FAILED, ready_line
from worker.own_address import with_own_address


def main(argv: list[str] | None = None) -> int:
    """Run one component until it is told to stop. Returns its exit code."""
    options = _parse(argv)
    try:
        run_component(options, _config(options))
    except ConfigError as error:
        return _fail(error.message, EXIT_CONFIG)
    except ServingError as error:
        return _fail(error.message, EXIT_FAILED)
    return 0


def announce(addresses: Mapping[str, str]) -> None:
    """Tell the launcher that this component serves, and where."""
    print(ready_line(addresses), flush=True)


def run_component(options: argparse.Namespace, config: ClusterConfig) -> None:
    """Serve as ``options.kind`` until told to stop. Raises ConfigError and other ServingErrors."""
    match options.kind:
        case "router":
            import router.service

            asyncio.run(router.service.run(config, announce=announce))
        case "gateway":
            import gateway.service

            gateway.service.run(config, gateway_id=options.gateway_id, on_listening=announce)
        case _:
            asyncio.run(_worker(options, config))


def _worker(options: argparse.Namespace, config: ClusterConfig) -> Coroutine[Any, Any, None]:
    model, role = config.model(options.model), Role(options.role)
    if role not in model.pools:
        raise ConfigError(f"model {model.name!r} has no {role} pool; pools: {', '.join(model.pools)}")
    pool = model.pools[role]
    set_worker_environment(pool.num_threads, interprets=pool.device == "interpreter")
    from baton.roles import make_role
    from worker.lives import run_worker

    config = with_own_address(config)
    return run_worker(config, model, role, worker_id=options.worker_id, announce=announce, make_role=make_role)


def _config(options: argparse.Namespace) -> ClusterConfig:
    """The launcher's effective configuration as it is, or for a person a file, the environment and --set."""
    if options.config_json is not None:
        return ClusterConfig.model_validate_json(options.config_json)
    return load_config(options.config, overrides=options.set)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton.process", description="One process of a cluster.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("router", "gateway", "worker"):
        sub = kinds.add_parser(kind)
        sub.add_argument("--config", metavar="FILE")
        sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
        sub.add_argument("--config-json", help="the whole effective configuration, in place of the two above")
        add_component_arguments(sub, kind)
    return parser.parse_args(argv)


def add_component_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """What a component is told beside the configuration."""
    if kind == "gateway":
        parser.add_argument("--gateway-id", default="gateway-0", metavar="ID", help="unique among the cell's gateways")
    if kind == "worker":
        parser.add_argument("--model", required=True, help="name of a configured model")
        parser.add_argument("--role", required=True, choices=[str(role) for role in Role])
        parser.add_argument("--worker-id", required=True, metavar="ID", help="unique among the cell's workers")


def _fail(message: str, code: int) -> int:
    print(ERROR_PREFIX + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
