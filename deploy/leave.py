"""``python -m deploy.leave``: lets every worker of this container finish, before whatever runs them ends.

For the pre-stop hook of pods in which Ray runs our workers: Ray ends its children at once.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

import psutil

POLL_S = 0.2


def leave(processes: Iterable[psutil.Process], timeout_s: float) -> int:
    """Tells each worker among them to drain, as an operator's SIGTERM does, and waits until all are gone. Returns how
    many are not."""
    left = [process for process in processes if _is_worker(process)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    ends_at = time.monotonic() + timeout_s
    while left and time.monotonic() < ends_at:
        time.sleep(POLL_S)
        left = [process for process in left if _is_worker(process)]
    return len(left)


def _is_worker(process: psutil.Process) -> bool:
    """Ours, not the one that supervises it."""
    try:
        words = process.cmdline()
        is_ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    return not is_ended and process.pid != os.getpid() and _are_pair(words, "baton.process", "worker")


def _are_pair(words: list[str], first: str, second: str) -> bool:
    return any(pair == (first, second) for pair in pairwise(words))


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy.leave", description=__doc__)
    parser.add_argument("--timeout", type=float, required=True, metavar="SECONDS")
    return min(1, leave(psutil.process_iter(), parser.parse_args().timeout))


if __name__ == "__main__":
    sys.exit(main())
