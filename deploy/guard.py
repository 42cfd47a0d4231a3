"""Run a command and leave nothing of it behind: ``python -m deploy.guard [--remove DIR] -- COMMAND ...``.

For commands whose own children wander off (Ray's agents leave their group and outlive a killed raylet by a minute).
The guard is the subreaper of its tree: whatever loses its parent becomes a child of the guard. When the command ends,
when the guard gets SIGTERM, or when the guard's parent dies, it ends the command (SIGTERM, then SIGKILL after
``--grace``; at once on SIGQUIT), kills every descendant and removes DIR. Exits with the command's code.
"""

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 3.0
"""How long to go on killing. A process that survives SIGKILL for so long hangs in the kernel."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy.guard")
    parser.add_argument("--parent", type=int, required=True, help="pid whose death ends the command")
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--remove", default="")
    parser.add_argument("--keep-fd", type=int, action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tree = _Tree()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != options.parent:
        return 1
    try:
        child = subprocess.Popen(options.command, pass_fds=options.keep_fd)
        for fd in options.keep_fd:
            os.close(fd)
        code = tree.wait(child.pid, grace_s=options.grace)
    finally:
        tree.sweep()
        if options.remove:
            shutil.rmtree(options.remove, ignore_errors=True)
    return code


class _Tree:
    """The descendants of this process. Signals arrive on a pipe, so that none is lost between a check and a wait."""

    def __init__(self) -> None:
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._is_told_to_stop = False
        self._is_told_to_kill = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _on_stop(self, number: int, frame: object) -> None:
        self._is_told_to_stop = True
        self._is_told_to_kill |= number == signal.SIGQUIT

    def wait(self, pid: int, *, grace_s: float) -> int:
        """Until ``pid`` has ended, by itself or because we were told to stop. Returns its exit code as of the shell."""
        codes: dict[int, int] = {}
        kill_at: float | None = None
        while pid not in codes:
            if self._is_told_to_stop and kill_at is None:
                kill_at = time.monotonic() + (0 if self._is_told_to_kill else grace_s)
                _signal(pid, signal.SIGTERM)
            if self._is_told_to_kill or (kill_at is not None and time.monotonic() >= kill_at):
                _signal(pid, signal.SIGKILL)
            self._pause(None if kill_at is None else max(0.01, kill_at - time.monotonic()))
            _reap(codes.__setitem__)
        return codes[pid]

    def sweep(self) -> None:
        """Kill and reap every descendant, however deep; new orphans included."""
        give_up_at = time.monotonic() + SWEEP_S
        while time.monotonic() < give_up_at:
            _reap(lambda pid, code: None)
            descendants = psutil.Process().children(recursive=True)
            if not descendants:
                return
            for process in descendants:
                _signal(process.pid, signal.SIGKILL)
            self._pause(0.05)

    def _pause(self, timeout_s: float | None) -> None:
        """Until a signal (a child's end is one) or the timeout."""
        if select.select([self._wakeup], [], [], timeout_s)[0]:
            os.read(self._wakeup, 4096)


def _reap(note: Callable[[int, int], None]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        note(pid, 128 - code if code < 0 else code)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
