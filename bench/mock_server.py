"""Serves a cell of mock workers over HTTP until its standard input ends: ``python -m bench.mock_server``. Prints its
URL first. For clients that are measured against each other."""

import argparse
import asyncio
import sys

from bench.cell import MockCell
from core.costs import HandoffCosts, StepCosts

COSTS = StepCosts.linear(
    fixed_s=0.02,
    prompt_token_s=2e-4,
    decode_row_s=5e-4,
    handoff=HandoffCosts(fixed_s=0.004, token_s=2e-6),
)
"""Long steps: what the machine is busy with beside them should not matter."""


async def serve(options: argparse.Namespace) -> None:
    sizes = {"prefill": options.prefill, "decode": options.decode, "unified": options.unified}
    async with MockCell(COSTS, *options.set, **sizes) as cell:
        print(await cell.serve_http(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.mock_server", description=__doc__)
    for role, number in (("prefill", 1), ("decode", 1), ("unified", 0)):
        parser.add_argument(f"--{role}", type=int, default=number, metavar="N")
    parser.add_argument("--set", action="append", default=["router.mode=split"], metavar="KEY=VALUE")
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
