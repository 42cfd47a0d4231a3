"""Run a command that cannot outlive its parent: ``python -S -I leash.py PARENT_PID COMMAND ...``.

Asks the kernel for SIGKILL at the death of the parent thread, then becomes the command. Done here, in a fresh process,
and not between fork and exec of the parent: other threads of the parent may hold locks at that moment.
Run as a script, so it imports nothing of the project.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"baton: error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(2)


if __name__ == "__main__":
    main()
