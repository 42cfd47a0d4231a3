"""The arguments of ``baton keys``. What they do is in :mod:`baton.keys`, imported when it is asked for."""

import argparse
import asyncio

from core.config import ClusterConfig

AMOUNTS = (
    ("requests-per-minute", "requests that may begin in a minute"),
    ("tokens-per-minute", "prompt and answer tokens in a minute"),
    ("max-streams", "requests that may run at once, streamed or not"),
    ("tokens-per-day", "budget for a day (UTC)"),
    ("tokens-per-month", "budget for a calendar month (UTC)"),
)


def add_keys_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", common: argparse.ArgumentParser
) -> None:
    keys = commands.add_parser("keys", help="make, list and revoke API keys, and see what was used").add_subparsers(
        metavar="COMMAND", required=True
    )
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", action="store_true", help="for programs")

    terms = argparse.ArgumentParser(add_help=False)
    terms.add_argument("--tenant", required=True, help="whose key it is; tenants share nothing")
    terms.add_argument("--name", default="", help="what people call the key")
    terms.add_argument(
        "--model", action="append", dest="models", help="allow this model (again for more); default: all"
    )
    terms.add_argument("--priority", choices=["high", "normal", "low"], default="normal", help="who is served first")
    for name, text in AMOUNTS:
        terms.add_argument(f"--{name}", type=int, metavar="N", help=f"{text}; default: no limit")
    terms.add_argument("--expires-in-days", type=float, metavar="DAYS", help="default: it does not expire")

    create = keys.add_parser("create", parents=[common, output, terms], help="make a key and show it, once")
    create.set_defaults(run=_create)
    make = keys.add_parser(
        "make",
        parents=[common, terms],
        help="make a key for gateway.access.keys_file: show it, and what to write there",
    )
    make.set_defaults(run=_make)

    show = keys.add_parser("list", parents=[common, output], help="all keys, without their secrets")
    show.add_argument("--tenant", default="")
    show.set_defaults(run=_list)

    revoke = keys.add_parser("revoke", parents=[common, output], help="end a key; gateways notice within seconds")
    revoke.add_argument("key_id", metavar="ID", help="as `baton keys list` shows it")
    revoke.set_defaults(run=_revoke)

    usage = keys.add_parser("usage", parents=[common, output], help="tokens used, by day, tenant, key and model")
    usage.add_argument("--tenant", default="")
    usage.add_argument("--key", default="", metavar="ID")
    usage.add_argument("--since", default="", metavar="DAY", help="such as 2026-11-30 (UTC)")
    usage.add_argument("--until", default="", metavar="DAY")
    usage.set_defaults(run=_usage)


def _create(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.keys import create_key

    return asyncio.run(create_key(config, _terms(options), as_json=options.json))


def _make(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.keys import make_key

    return make_key(_terms(options))


def _terms(options: argparse.Namespace) -> dict[str, object]:
    """Those that were given."""
    amounts = (name.replace("-", "_") for name, _ in AMOUNTS)
    names = ("tenant", "name", "models", "priority", "expires_in_days", *amounts)
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _list(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.keys import list_keys

    return asyncio.run(list_keys(config, options.tenant, as_json=options.json))


def _revoke(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.keys import revoke_key

    return asyncio.run(revoke_key(config, options.key_id, as_json=options.json))


def _usage(options: argparse.Namespace, config: ClusterConfig) -> int:
    from baton.keys import show_usage

    which = {"tenant": options.tenant, "key_id": options.key, "since": options.since, "until": options.until}
    return asyncio.run(show_usage(config, which, as_json=options.json))
