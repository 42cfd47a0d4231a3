"""A component for launcher tests: says that it is ready, then does as its first argument tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> None:
    behaviour = sys.argv[1]
    if behaviour == "misconfigured":
        print("baton: error: the model file has no tensors; name another", file=sys.stderr)
        sys.exit(2)
    if behaviour == "sickly":
        print("something went wrong", flush=True)
        sys.exit(1)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "parent":
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    if behaviour == "mute":
        signal.pause()
    print(f'baton-ready {{"http":"127.0.0.1:{os.getpid()}"}}', flush=True)
    if behaviour == "leaving":
        sys.exit(0)
    signal.pause()


if __name__ == "__main__":
    main()
