"""Keeps one process running: under the process launcher, and inside every Ray supervisor actor.

One thread supervises one component. The thread, not an event loop, because the kernel ties the parent-death signal to
the thread that started the process: when the supervisor is gone, however it ended, so is its process.
"""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

from core.config import child_environment
from deploy.launcher import (
    ERROR_PREFIX,
    EXIT_CONFIG,
    ComponentEvent,
    ComponentSpec,
    ComponentState,
    parse_ready_line,
)

TAIL_LINES = 20
READ_BYTES = 65536
_LEASH = str(Path(__file__).with_name("leash.py"))


class Supervisor:
    """Keeps one component running. All methods may be called from any thread; ``emit`` is called from the supervisor's.

    The loop of the thread::

        spawn -> watch (output, exit, orders) -> exited -> backoff -> spawn ...
                                                    \\-> stopped | failed: the thread ends
    """

    def __init__(self, spec: ComponentSpec, *, log_dir: Path | None, emit: Callable[[ComponentEvent], None]) -> None:
        self.spec = spec
        self._log_path = None if log_dir is None else log_dir / f"{spec.name}.log"
        self._emit = emit
        self._event = partial(ComponentEvent, component=spec.name)
        self._lock = threading.Lock()
        self._orders_read, self._orders_write = os.pipe()
        self._must_stop = False
        self._must_restart = False
        self._must_kill = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"supervise-{spec.name}", daemon=True)

    # -- orders -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask for SIGTERM, then SIGKILL after the grace; STOPPED follows. Returns at once."""
        self._order(stop=True)

    def restart(self) -> None:
        """Ask for a fresh process now."""
        self._order(restart=True)

    def kill(self) -> None:
        """End the process without grace."""
        self._order(stop=True, kill=True)
        with self._lock:
            if self._process is not None:
                _signal_group(self._process, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the supervision to end; false if it has not after ``timeout``."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _order(self, *, stop: bool = False, restart: bool = False, kill: bool = False) -> None:
        with self._lock:
            self._must_stop |= stop
            self._must_restart |= restart
            self._must_kill |= kill
            if self._orders_write >= 0:
                os.write(self._orders_write, b"!")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._supervise()
        finally:
            with self._lock:
                os.close(self._orders_write)
                os.close(self._orders_read)
                self._orders_write = -1

    def _supervise(self) -> None:
        failures = early_failures = 0
        while not self._must_stop:
            self._must_restart = False
            try:
                run = _Run(self.spec, self._log_path)
            except OSError as error:
                message = f"cannot write its log {self._log_path}: {error.strerror}"
                self._emit(self._event(state=ComponentState.FAILED, message=message))
                return
            started = time.monotonic()
            try:
                process = self._spawn()
            except OSError as error:
                self._emit(
                    self._event(
                        state=ComponentState.FAILED, message=f"cannot start {self.spec.argv[0]}: {error.strerror}"
                    )
                )
                return
            self._emit(self._event(state=ComponentState.STARTED, pid=process.pid))
            try:
                self._watch(process, run)
            finally:
                run.close()
            code = _shell_code(process.returncode)
            has_left = code == 0 and run.is_ready and self.spec.restart.may_leave and not self._must_restart
            if self._must_stop or has_left:
                break
            ended = partial(self._event, pid=process.pid, exit_code=code, tail=tuple(run.tail))
            self._emit(ended(state=ComponentState.EXITED, message=run.error))
            if self._must_restart:
                continue
            if time.monotonic() - started >= self.spec.restart.healthy_s:
                failures = 0
            failures += 1
            early_failures = 0 if run.is_ready else early_failures + 1
            if code == EXIT_CONFIG or early_failures >= self.spec.restart.max_early_failures:
                message = run.error or f"ended with exit code {code} before it was ready"
                self._emit(ended(state=ComponentState.FAILED, message=message))
                return
            delay_s = self.spec.restart.delay_s(failures)
            self._emit(self._event(state=ComponentState.RESTARTING, delay_s=delay_s))
            self._pause(delay_s)
        self._emit(self._event(state=ComponentState.STOPPED))

    def _spawn(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", _LEASH, str(os.getpid()), *self.spec.argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(self.spec.env),
            start_new_session=True,
        )
        with self._lock:
            self._process = process
            if self._must_kill:
                _signal_group(process, signal.SIGKILL)
        return process

    def _watch(self, process: "subprocess.Popen[bytes]", run: "_Run") -> None:
        """Until the process has ended: take its output, obey orders. Its whole group is gone on return."""
        assert process.stdout is not None
        output = process.stdout
        output_fd = output.fileno()
        os.set_blocking(output_fd, False)
        exit_fd = os.pidfd_open(process.pid)
        kill_at: float | None = None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(output, selectors.EVENT_READ)
                selector.register(exit_fd, selectors.EVENT_READ)
                selector.register(self._orders_read, selectors.EVENT_READ)
                has_ended = False
                while not has_ended:
                    timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
                    ready = {key.fd for key, _ in selector.select(timeout)}
                    has_ended = exit_fd in ready
                    if output_fd in ready and self._take_output(output, run, process) == b"":
                        selector.unregister(output)
                        output_fd = -1
                    if self._orders_read in ready:
                        os.read(self._orders_read, 4096)
                    if (self._must_stop or self._must_restart) and kill_at is None:
                        kill_at = time.monotonic() + self.spec.grace_s
                        _signal_group(process, signal.SIGTERM)
                    if self._must_kill or (kill_at is not None and time.monotonic() >= kill_at):
                        _signal_group(process, signal.SIGKILL)
        finally:
            with self._lock:
                self._process = None
            # Members of the group that outlived their leader go with it, before its pid can be used again.
            _signal_group(process, signal.SIGKILL)
            process.wait()
            while self._take_output(output, run, process):
                pass
            output.close()
            os.close(exit_fd)

    def _take_output(self, output: IO[bytes], run: "_Run", process: "subprocess.Popen[bytes]") -> bytes | None:
        """Read once: None when there is nothing now, empty at the end of the stream."""
        try:
            data = os.read(output.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        addresses = run.feed(data)
        if addresses is not None and not self._must_stop:
            self._emit(self._event(state=ComponentState.READY, pid=process.pid, addresses=addresses))
        return data

    def _pause(self, delay_s: float) -> None:
        """Sleep that any order ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders_read, selectors.EVENT_READ)
            if selector.select(delay_s):
                os.read(self._orders_read, 4096)


class _Run:
    """What one process said: its log file, its last lines, whether it was ready, why it could not start."""

    def __init__(self, spec: ComponentSpec, log_path: Path | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.is_ready = False
        self.error = ""
        self._partial = b""
        self._log = None if log_path is None else log_path.open("ab", buffering=0)
        self._name = spec.name

    def feed(self, data: bytes) -> Mapping[str, str] | None:
        """Take output; returns the addresses if a ready line was in it."""
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:  # a full disk must not end the component
                self.tail.append(f"its log ends here: {error.strerror}")
                self.close()
        addresses = None
        *lines, self._partial = (self._partial + data).split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip()
            found = None if self.is_ready else parse_ready_line(line)
            if found is not None:
                self.is_ready = True
                addresses = found
                continue
            if line.startswith(ERROR_PREFIX):
                self.error = line.removeprefix(ERROR_PREFIX)
            if line:
                self.tail.append(line)
        return addresses

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Signal the whole group of a child that has not been reaped; a group that is gone is no error."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode
